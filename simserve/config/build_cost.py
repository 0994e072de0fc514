"""From what a configuration says of step times to a cost model."""

from __future__ import annotations

from inspect import Parameter, signature

from simserve.config.executor import Cost, CustomCost, FormulaCost, ProfileCost, RooflineCost
from simserve.config.loader import LoadedConfig
from simserve.errors import ConfigError, PluginError, Problem, did_you_mean
from simserve.protocols import CostModel
from simserve.registry import check_protocol, resolve

__all__ = ["build_cost_model", "with_residual_noise"]

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def build_cost_model(loaded: LoadedConfig, config: Cost, key: str) -> CostModel:
    """The cost model that `config` describes, which stands under `key`.

    Raises:
        ConfigError: a value or an option is wrong, with its position.
        UnknownNameError, PluginError: no class of that name, or one without `price`.
    """
    if isinstance(config, CustomCost):
        return _own(loaded, config, key)
    source = next((one for one in ("name", "path") if getattr(config, one, None)), None)
    with loaded.placing(f"{key}.{source}" if source else key):
        return _built_in(loaded, config)


def _built_in(loaded: LoadedConfig, config: FormulaCost | RooflineCost | ProfileCost) -> CostModel:
    cls = resolve("cost_models", config.kind)
    cost_model: CostModel
    if isinstance(config, FormulaCost):
        cost_model = cls(config.base_s, config.per_token_s, config.per_attended_token_s)
    elif isinstance(config, RooflineCost):
        cost_model = cls(
            loaded.model,
            loaded.gpu,
            kv_cache_dtype=loaded.config.kv_cache.dtype,
            **config.model_dump(exclude={"kind"}),
        )
    else:
        cost_model = cls(
            loaded.model,
            loaded.gpu,
            name=config.name,
            path=config.path,
            base_dir=loaded.base_dir,
            kv_cache_dtype=loaded.config.kv_cache.dtype,
            host_scale=config.host_scale,
            host=config.host,
        )
    return cost_model


def _own(loaded: LoadedConfig, config: CustomCost, key: str) -> CostModel:
    """A class of the user's, made of the model, the GPU and its options by name."""
    with loaded.placing(f"{key}.kind"):
        cls = resolve("cost_models", config.kind, loaded.base_dir)
        check_protocol(cls, "cost_models")
        _check_options(cls, config, f"{key}.options")
    with loaded.placing(f"{key}.options" if config.options else f"{key}.kind"):
        cost_model: CostModel = cls(loaded.model, loaded.gpu, **config.options)
        return cost_model


def _check_options(cls: type, config: CustomCost, key: str) -> None:
    """Compare what a class can be given, beside the model and the GPU, with the options.

    Raises:
        ConfigError: options are unknown or lacking; all of them at once.
        PluginError: the class does not take a model and a GPU, or something without a name.
    """
    shape = signature(cls)
    try:
        first_two = shape.bind_partial(None, None).arguments
        others = [one for name, one in shape.parameters.items() if name not in first_two]
        shape.bind(None, None, **{one.name: None for one in others if one.kind in _NAMED})
    except TypeError as error:
        message = f"{config.kind} cannot be made of a model and a GPU: {error}"
        raise PluginError(message) from None
    given = {name for name in first_two if shape.parameters[name].kind in _NAMED}
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in others)
    named = {one.name: one for one in others if one.kind in _NAMED}
    problems = []
    for name in config.options:
        if name in given or not (takes_any or name in named):
            hint = f"{did_you_mean(name, named)}; it has {', '.join(named) or 'none'}"
            message = f"{config.kind} has no such option{hint}"
            problems.append(Problem(path=f"{key}.{name}", message=message))
    for name, one in named.items():
        if one.default is Parameter.empty and name not in config.options:
            problems.append(Problem(path=key, message=f"{config.kind} needs {name}"))
    if problems:
        raise ConfigError(problems)


def with_residual_noise(cost_model: CostModel, seed: int) -> CostModel:
    """Step times that scatter about a profile as the measured ones did."""
    from simserve.cost.noise import ResidualNoise
    from simserve.cost.profile import ProfileCost as ProfileCostModel

    assert isinstance(cost_model, ProfileCostModel)
    return ResidualNoise(cost_model, seed)
