"use strict";
// Draws the charts of a report as SVG, follows the pointer, and sorts tables. Uses no library.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const HEIGHT = 250, TOP = 12, BOTTOM = 40, RIGHT = 12;

  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const shown = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) || Math.abs(value) >= 100) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    const digits = value.toPrecision(3);
    return digits.includes("e") ? Number(digits).toLocaleString("en", { maximumFractionDigits: 9 }) : digits;
  };

  // A place on an axis: all of its digits, or neighbours would read alike.
  const tick = (value) => Number(value.toPrecision(9)).toLocaleString("en", { maximumFractionDigits: 9 });

  // Axes ------------------------------------------------------------------------------------
  const linearTicks = (low, high, count) => {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  };
  const logTicks = (low, high, count) => {
    const of = (steps) => {
      const ticks = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
        for (const m of steps) if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) ticks.push(m * 10 ** e);
      return ticks;
    };
    const found = [[1, 2, 5], [1, 3], [1]].map(of).find((ticks, place) => place === 2 || ticks.length <= count + 1);
    return found.length > 2 ? found : linearTicks(low, high, count);
  };
  const makeAxis = (spec, values, from, to, count) => {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    if (!(low <= high)) { low = 0; high = 1; }
    if (spec.max !== undefined) high = spec.max;
    if (spec.zero && !spec.log) low = Math.min(0, low);
    if (low === high) { low = spec.log ? low / 2 : low - (Math.abs(low) || 1) * 0.5; high = spec.log ? high * 2 : high + (Math.abs(high) || 1) * 0.5; }
    const of = spec.log ? Math.log10 : (v) => v;
    const room = spec.pad ? (of(high) - of(low)) * 0.06 : 0;
    const first = of(low) - (spec.zero && low === 0 ? 0 : room), last = of(high) + room;
    const undo = spec.log ? (v) => 10 ** v : (v) => v;
    const at = (v) => from + (of(v) - first) / (last - first) * (to - from);
    const half = (v) => 3.5 * tick(v).length + 3;
    const fit = spec.ticks && spec.ticks.every((v, i, all) => i === 0 || at(v) - at(all[i - 1]) > half(v) + half(all[i - 1]));
    return {
      at,
      value: (p) => undo(first + (p - from) / (to - from) * (last - first)),
      ticks: fit ? spec.ticks : (spec.log ? logTicks : linearTicks)(undo(first), undo(last), count),
    };
  };

  // Charts ----------------------------------------------------------------------------------
  const ways = { step: (x, y) => `H${x}V${y}`, front: (x, y) => `V${y}H${x}`, line: (x, y) => `L${x} ${y}` };
  const path = (points, way) => points.map(([x, y], i) => i === 0 ? `M${x} ${y}` : ways[way](x, y)).join("");
  const pixel = (v) => Math.round(v * 10) / 10;

  // Below and to the right of points of a front, where nothing is; side by side where they are near.
  const drawNumbers = (numbers, points) => {
    const taken = [];
    return numbers.map((number, i) => {
      let [a, b] = [points[i][0] + 6, points[i][1] + 15];
      while (taken.some(([c, d]) => Math.abs(a - c) < 18 && Math.abs(b - d) < 13)) a += 1;
      taken.push([a, b]);
      return `<text x="${a}" y="${b}">${number}</text>`;
    }).join("");
  };

  const drawSeries = (s, x, y, size) => {
    if (!s.x.length) return "";
    const colour = `var(--c${s.colour})`, step = ["step", "area", "shade"].includes(s.shape), way = step ? "step" : s.shape === "front" ? "front" : "line";
    const line = (ys) => s.x.map((v, i) => [pixel(x.at(v)), pixel(y.at(ys[i]))]);
    const band = (upper, lower, opacity) => {
      const back = line(lower).reverse();
      const down = step ? back.map(([a, b], i) => i === 0 ? `L${a} ${b}` : `V${b}H${a}`).join("") : back.map(([a, b]) => `L${a} ${b}`).join("");
      return `<path d="${path(line(upper), way)}${down}Z" fill="${colour}" fill-opacity="${opacity}"/>`;
    };
    let svg = "";
    if (s.shape === "shade") return band(s.y, s.base, 0.4);
    if (s.shape === "area") return band(s.y, s.base || s.y.map(() => 0), 0.85);
    if (s.low) svg += band(s.high, s.low, 0.22);
    if (s.shape !== "points") svg += `<path d="${path(line(s.y), way)}" fill="none" stroke="${colour}" stroke-width="1.8"${s.dash ? ' stroke-dasharray="6 4"' : ""}/>`;
    if (["points", "dots", "front"].includes(s.shape)) for (const [a, b] of line(s.y)) svg += `<circle cx="${a}" cy="${b}" r="${size}" fill="${colour}" fill-opacity="0.75"/>`;
    return svg + drawNumbers(s.numbers || [], line(s.y));
  };

  const drawXY = (chart, width) => {
    const shades = (chart.shades || []).map((s) => ({ ...s, shape: "shade" }));
    const all = (key) => [...shades, ...chart.series].flatMap((s) => [s[key], ...(key === "y" ? [s.low, s.high] : [])]).filter(Boolean).flat();
    const trial = makeAxis(chart.y, all("y"), HEIGHT - BOTTOM, TOP, chart.y.log ? 7 : 6);
    const left = 14 + 7 * Math.max(...trial.ticks.map((t) => tick(t).length), 1) + (chart.y.label ? 16 : 0);
    const room = chart.x.log ? Math.max(3, Math.floor((width - left) / 62)) : Math.max(4, Math.floor(width / 62));
    const x = makeAxis(chart.x, all("x"), left, width - RIGHT, room);
    const y = trial;
    let svg = "";
    for (const t of y.ticks) svg += `<line class="grid" x1="${left}" x2="${width - RIGHT}" y1="${y.at(t)}" y2="${y.at(t)}"/><text x="${left - 6}" y="${y.at(t) + 4}" text-anchor="end">${tick(t)}</text>`;
    for (const t of x.ticks) svg += `<line class="grid" x1="${x.at(t)}" x2="${x.at(t)}" y1="${TOP}" y2="${HEIGHT - BOTTOM}"/><text x="${x.at(t)}" y="${HEIGHT - BOTTOM + 16}" text-anchor="middle">${tick(t)}</text>`;
    svg += `<text x="${(left + width - RIGHT) / 2}" y="${HEIGHT - 6}" text-anchor="middle">${escaped(chart.x.label)}</text>`;
    if (chart.y.label) svg += `<text transform="translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">${escaped(chart.y.label)}</text>`;
    const count = Math.max(...chart.series.map((s) => s.x.length), 0);
    for (const s of [...shades, ...chart.series]) svg += drawSeries(s, x, y, count > 150 ? 2.5 : 4);
    for (const at of (chart.marks || { x: [] }).x) svg += `<line x1="${x.at(at)}" x2="${x.at(at)}" y1="${TOP - 11}" y2="${TOP - 3}" stroke="var(--c${chart.marks.colour})" stroke-width="1.5"/>`;
    if (!count) svg += `<text x="${(left + width) / 2}" y="${HEIGHT / 2}" text-anchor="middle">no data</text>`;
    return { svg, find: chart.hover === "points" ? nearest(chart, x, y) : across(chart, x) };
  };

  // The point nearest to the pointer.
  const nearest = (chart, x, y) => (px, py) => {
    let best = null, least = 40 ** 2;
    for (const s of chart.series) s.x.forEach((v, i) => {
      const d = (x.at(v) - px) ** 2 + (y.at(s.y[i]) - py) ** 2;
      if (d < least) { least = d; best = [s, i]; }
    });
    if (!best) return null;
    const [s, i] = best, a = x.at(s.x[i]), b = y.at(s.y[i]);
    const lines = [s.text ? s.text[i] : s.name, `${chart.x.label}: ${shown(s.x[i])}`, `${chart.y.label || s.name}: ${shown(s.y[i])}`];
    return { x: a, y: b, lines, svg: `<circle cx="${a}" cy="${b}" r="6.5" fill="none" stroke="var(--ink)" stroke-width="1.5"/>` };
  };

  // What every series is at the pointer's place on the x axis.
  const across = (chart, x) => (px) => {
    const at = x.value(px), lines = [`${chart.x.label}: ${shown(at)}`];
    for (const s of chart.series) {
      let low = 0, high = s.x.length;
      while (low < high) { const middle = (low + high) >> 1; if (s.x[middle] <= at) low = middle + 1; else high = middle; }
      if (!s.x.length || (low === 0 && !chart.cumulative)) continue;
      const value = low === 0 ? 0 : s.y[low - 1] - (s.base ? s.base[low - 1] : 0);
      lines.push(`${s.name}: ${shown(value)}${s.high && low && s.high[low - 1] !== s.low[low - 1] ? ` (${shown(s.low[low - 1])} – ${shown(s.high[low - 1])})` : ""}`);
    }
    return { x: px, y: TOP, lines, svg: `<line class="cross" x1="${px}" x2="${px}" y1="${TOP}" y2="${HEIGHT - BOTTOM}"/>` };
  };

  const drawHeat = (chart, width) => {
    const columns = chart.x.values.length, rows = chart.y.values.length;
    const left = 30 + 7 * Math.max(...chart.y.values.map((v) => shown(v).length));
    const cell = [(width - left - RIGHT) / columns, (HEIGHT - BOTTOM - TOP) / rows];
    let svg = "";
    chart.cells.forEach((line, r) => line.forEach((value, c) => {
      const a = left + c * cell[0], b = HEIGHT - BOTTOM - (r + 1) * cell[1], shade = chart.shades[r][c];
      if (value === null) return;
      svg += `<rect x="${a + 1}" y="${b + 1}" width="${cell[0] - 2}" height="${cell[1] - 2}" rx="2" style="fill:color-mix(in oklab, var(--heat1) ${100 * shade}%, var(--heat0))"/>`;
      if (cell[0] > 46 && cell[1] > 15) svg += `<text x="${a + cell[0] / 2}" y="${b + cell[1] / 2 + 4}" text-anchor="middle" style="fill:var(--heat-ink${shade > 0.55 ? 1 : 0})">${shown(value)}</text>`;
    }));
    const every = Math.ceil(44 / cell[0]);
    chart.x.values.forEach((v, c) => { if (c % every === 0) svg += `<text x="${left + (c + 0.5) * cell[0]}" y="${HEIGHT - BOTTOM + 16}" text-anchor="middle">${shown(v)}</text>`; });
    chart.y.values.forEach((v, r) => { svg += `<text x="${left - 6}" y="${HEIGHT - BOTTOM - (r + 0.5) * cell[1] + 4}" text-anchor="end">${shown(v)}</text>`; });
    svg += `<text x="${(left + width - RIGHT) / 2}" y="${HEIGHT - 6}" text-anchor="middle">${escaped(chart.x.label)}</text>`;
    svg += `<text transform="translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">${escaped(chart.y.label)}</text>`;
    const find = (px, py) => {
      const c = Math.floor((px - left) / cell[0]), r = Math.floor((HEIGHT - BOTTOM - py) / cell[1]);
      if (c < 0 || r < 0 || c >= columns || r >= rows) return null;
      const a = left + c * cell[0], b = HEIGHT - BOTTOM - (r + 1) * cell[1];
      const lines = [`${chart.x.label}: ${shown(chart.x.values[c])}`, `${chart.y.label}: ${shown(chart.y.values[r])}`, `${chart.value}: ${shown(chart.cells[r][c])}`];
      return { x: a, y: b + cell[1], lines, svg: `<rect x="${a + 1}" y="${b + 1}" width="${cell[0] - 2}" height="${cell[1] - 2}" fill="none" stroke="var(--ink)" stroke-width="1.5"/>` };
    };
    return { svg, find };
  };

  const legend = (chart) => (chart.series || []).filter((s) => s.name).concat(chart.marks && chart.marks.x.length ? [chart.marks] : [])
    .map((s) => `<span><i class="${s.dash ? "dash" : ""}" style="--dash:var(--c${s.colour});${s.dash ? "" : `background:var(--c${s.colour})`}"></i>${escaped(s.name)}</span>`).join("");

  const mount = (figure) => {
    const chart = charts[Number(figure.dataset.chart)];
    figure.innerHTML = `<figcaption>${escaped(chart.title)}</figcaption><div class="legend">${legend(chart)}</div><svg role="img" aria-label="${escaped(chart.title)}"></svg><div class="tip" hidden></div>`;
    const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip");
    let drawn = null;
    const draw = () => {
      const width = Math.max(260, svg.clientWidth);
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      drawn = (chart.cells ? drawHeat : drawXY)(chart, width);
      svg.innerHTML = `${drawn.svg}<g class="at"></g>`;
      tip.hidden = true;
    };
    const leave = () => { tip.hidden = true; svg.querySelector(".at").innerHTML = ""; };
    const move = (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const found = drawn.find((event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
      if (!found) { leave(); return; }
      svg.querySelector(".at").innerHTML = found.svg;
      tip.textContent = found.lines.join("\n");
      tip.hidden = false;
      const card = figure.getBoundingClientRect(), x = box.left - card.left + found.x / scale;
      const fits = x + 14 + tip.offsetWidth < card.width;
      tip.style.left = `${Math.max(4, fits ? x + 12 : x - 12 - tip.offsetWidth)}px`;
      tip.style.top = `${box.top - card.top + found.y / scale + 8}px`;
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
    let width = 0;
    new ResizeObserver(() => { if (svg.clientWidth !== width) { width = svg.clientWidth; draw(); } }).observe(figure);
    draw();
  };
  document.querySelectorAll("figure[data-chart]").forEach(mount);

  // One legend for several charts: columns as wide as the longest name.
  document.querySelectorAll("[data-legend]").forEach((place) => {
    const chart = charts[Number(place.dataset.legend)];
    place.innerHTML = legend(chart);
    place.style.setProperty("--name", `${Math.max(...chart.series.map((s) => s.name.length))}ch`);
  });

  // Tiles: no row with one tile left over, where another number of columns avoids it.
  document.querySelectorAll(".tiles").forEach((tiles) => new ResizeObserver(() => {
    const count = tiles.children.length, most = Math.max(1, Math.floor(tiles.clientWidth / 145));
    tiles.style.gridTemplateColumns = `repeat(${Math.ceil(count / Math.ceil(count / most))}, minmax(0, 1fr))`;
  }).observe(tiles));

  // Tables ----------------------------------------------------------------------------------
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? null : Number(cell.dataset.v);
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  const sort = (head) => {
    const table = head.closest("table"), column = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
    // What has no value stays at the end, whichever way the rest runs.
    rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : up ? compare(a, b) : compare(b, a));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  document.querySelectorAll("table.sortable th button").forEach((button) => button.addEventListener("click", () => sort(button.parentElement)));
})();
