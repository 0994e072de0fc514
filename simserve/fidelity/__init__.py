"""How true the simulator is: comparison of simulated runs with what real engines recorded."""
