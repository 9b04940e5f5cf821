// Two figures that a reader moves: the residual of the acceptance rule, and the speed-up over settings.
//
// One source for two places: JupyterLab loads this module through anywidget (widgets.py), the book as a script
// (docs/book.py). Above `make` is arithmetic without a page; tests compare it with the library's.

const sum = (values) => values.reduce((total, value) => total + value, 0);

export const accepted = (p, q) => p.map((mass, x) => Math.min(mass, q[x]));

// norm(max(0, p - q)), and p where nothing is left, as in specnb.distributions.
export function residual(p, q) {
  const left = p.map((mass, x) => Math.max(0, mass - q[x]));
  return sum(left) > 0 ? left.map((mass) => mass / sum(left)) : p;
}

export function sample(probs, uniform) {
  const threshold = uniform * sum(probs);
  let cumulated = 0;
  const token = probs.findIndex((mass) => (cumulated += mass) > threshold);
  return token < 0 ? probs.length - 1 : token;
}

// One draft token: sampled from q, tested, and after a rejection replaced by a sample from `instead`.
export function step(p, q, instead, [draft, accept, final]) {
  const drafted = sample(q, draft);
  const kept = accept < p[drafted] / q[drafted];
  return { drafted, kept, token: kept ? drafted : sample(instead, final) };
}

// The distribution of the token that comes out.
export function emitted(p, q, instead) {
  const kept = accepted(p, q);
  return kept.map((mass, x) => mass + (1 - sum(kept)) * instead[x]);
}

export const distance = (p, q) => sum(p.map((mass, x) => Math.abs(mass - q[x]))) / 2;

// The mean distance between the fractions of n samples and the distribution that they come from, for large n.
export const chance = (p, n) => sum(p.map((mass) => Math.sqrt((mass * (1 - mass)) / (2 * Math.PI * n))));

// `probs` with the probability `value` for x; the others keep their proportions.
export function moved(probs, x, value) {
  const others = 1 - probs[x];
  return probs.map((mass, y) =>
    y === x ? value : others > 0 ? (mass * (1 - value)) / others : (1 - value) / (probs.length - 1));
}

// Equation 1.
export const expectedTokens = (alpha, gamma) =>
  alpha === 1 ? gamma + 1 : (1 - alpha ** (gamma + 1)) / (1 - alpha);

// v(n) of specnb.measure.predict.roofline: reading the weights takes as long as the arithmetic of `ridge` tokens.
export const verifyCost = (n, batch, ridge) => (1 + (n * batch) / ridge) / (1 + batch / ridge);

export const speedUp = (alpha, gamma, c, batch, ridge) =>
  expectedTokens(alpha, gamma) / (gamma * c + verifyCost(gamma + 1, batch, ridge));

// The best gamma, 0 where none is faster.
export function bestGamma(alpha, c, batch, ridge, largest = 20) {
  let best = 0;
  for (let gamma = 1; gamma <= largest; gamma++)
    if (speedUp(alpha, gamma, c, batch, ridge) > speedUp(alpha, best, c, batch, ridge)) best = gamma;
  return best;
}

// Tokens for which arithmetic takes as long as reading 16-bit weights, from data sheets (specnb.measure.predict.GPUS).
export const RIDGES = { "v(n) = 1, as Theorem 3.8 assumes": Infinity, H100: 989e3 / 3350, "TPU v4": 275e3 / 1228,
  "A100-80GB": 312e3 / 2039, "RTX 4090": 165e3 / 1008, "Apple M4 Max": 17.2e3 / 546 };

// alpha, c and gamma in Tables 2 and 4 of the paper (T5-XXL, batch 1).
export const PRESETS = { "translation, T5-small": [0.75, 0.02, 7], "translation, T5-base": [0.8, 0.04, 7],
  "translation, T5-large": [0.82, 0.11, 7], "summaries, T5-small": [0.65, 0.02, 5],
  "summaries at temperature 1, T5-large": [0.56, 0.11, 3] };

const COLOURS = { target: "#0072B2", draft: "#E69F00", accepted: "#009E73", rejected: "#D55E00", recovered: "#56B4E9",
  measured: "#CC79A7", muted: "#8A8A8A" };
const SVG = new Set(["svg", "rect", "line", "path", "circle", "text", "g", "title"]);
const STYLE = `
.specnb-widget { max-width: 44rem; font-size: 0.9rem; line-height: 1.4; margin: 1rem 0; }
.specnb-widget svg { width: 100%; height: auto; display: block; }
.specnb-widget .controls { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: 0.2rem 1.5rem; }
.specnb-widget label { display: grid; grid-template-columns: 7em 1fr 3.2em; gap: 0.5em; align-items: center; }
.specnb-widget label.wide { grid-template-columns: 7em 1fr; }
.specnb-widget input, .specnb-widget select { width: 100%; min-width: 0; margin: 0; font: inherit; }
.specnb-widget output { text-align: right; font-variant-numeric: tabular-nums; }
.specnb-widget button { font: inherit; padding: 0.2rem 0.8rem; margin: 0.4rem 0.5rem 0.4rem 0; cursor: pointer; }
.specnb-widget table { border-collapse: collapse; margin: 0.5rem 0; font-variant-numeric: tabular-nums; }
.specnb-widget th, .specnb-widget td { padding: 0.1rem 0.7rem; text-align: right; font-weight: normal; border: 0; }
.specnb-widget th:first-child { text-align: left; }
.specnb-widget p { margin: 0.3rem 0; min-height: 1.4em; }
.specnb-widget text { fill: currentColor; font-size: 11px; font-family: inherit; }`;

function make(name, attributes = {}, ...children) {
  const node = SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function slider(name, [min, max, step], value, moves, shown = (number) => number.toFixed(2)) {
  const input = make("input", { type: "range", min, max, step });
  const output = make("output");
  const show = (number) => {
    input.value = number;
    output.textContent = shown(Number(number));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  show(value);
  input.addEventListener("input", () => (show(input.value), moves(Number(input.value))));
  return { node: make("label", {}, name, input, output), show };
}

function choice(name, options, moves) {
  const select = make("select", {}, ...options.map((option) => make("option", {}, option)));
  select.addEventListener("change", () => moves(select.value));
  return { node: make("label", { class: "wide" }, name, select), show: (option) => (select.value = option) };
}

const button = (name, press) => {
  const node = make("button", { type: "button" }, name);
  node.addEventListener("click", press);
  return node;
};

const written = (x, y, text, anchor = "middle") => make("text", { x, y, "text-anchor": anchor }, text);

// A generator of uniforms (mulberry32), so that everybody sees the same steps.
function uniforms(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function residualFigure(el) {
  const names = ["a", "b", "c", "d"];
  const RULES = ["the residual", "p (a bug)"];
  let p = [0.5, 0.25, 0.15, 0.1], q = [0.25, 0.3, 0.35, 0.1], rule = RULES[0];
  let counts, steps, kept, uniform, last;
  const picture = make("svg", { viewBox: "0 0 480 225", role: "img", "aria-label":
    "For each token a bar: accepted mass, on it residual mass up to p and rejected mass up to q; the table has the numbers" });
  const numbers = make("table"), status = make("p", { role: "status" });
  const instead = () => (rule === RULES[0] ? residual(p, q) : p);

  function reset() {
    [counts, steps, kept, uniform, last] = [names.map(() => 0), 0, 0, uniforms(1), null];
    draw();
  }
  function run(n) {
    for (let i = 0; i < n; i++) {
      const u = [uniform(), uniform(), uniform()];
      last = { u: u[1], ...step(p, q, instead(), u) };
      counts[last.token] += 1;
      kept += last.kept;
      steps += 1;
    }
    draw(n === 1);
  }
  function draw(single = false) {
    const beta = sum(accepted(p, q)), target = emitted(p, q, instead());
    const top = Math.max(...p, ...q) * 1.1, y = (mass) => 200 - (185 * mass) / top;
    picture.replaceChildren(make("line", { x1: 30, x2: 470, y1: 200, y2: 200, stroke: COLOURS.muted }));
    names.forEach((name, x) => {
      const at = 50 + 105 * x, low = Math.min(p[x], q[x]);
      const bar = (from, to, more) =>
        make("rect", { x: at, width: 70, y: y(to), height: Math.max(0, y(from) - y(to)), ...more });
      picture.append(
        bar(0, low, { fill: COLOURS.accepted }),
        bar(low, p[x], { fill: COLOURS.recovered }),
        bar(low, q[x], { fill: COLOURS.rejected, "fill-opacity": 0.25, stroke: COLOURS.rejected, "stroke-dasharray": 3 }),
        make("line", { x1: at - 6, x2: at + 76, y1: y(p[x]), y2: y(p[x]), stroke: COLOURS.target, "stroke-width": 2.5 }),
        make("line", { x1: at - 6, x2: at + 76, y1: y(q[x]), y2: y(q[x]), stroke: COLOURS.draft, "stroke-width": 2.5,
          "stroke-dasharray": "6 3" }),
        written(at + 35, 216, name));
      if (steps) picture.append(make("circle", { cx: at + 35, cy: Math.max(4, y(counts[x] / steps)), r: 5,
        fill: "black", stroke: "white", "stroke-width": 1.5 }));
    });
    const rows = { "p (blue line)": p, "q (orange, dashed)": q, "accepted (green)": accepted(p, q),
      "residual mass (light blue)": p.map((mass, x) => Math.max(0, mass - q[x])),
      "rejected mass (hollow)": q.map((mass, x) => Math.max(0, mass - p[x])), "exact output of this rule": target,
      "sampled (black dot)": steps ? counts.map((n) => n / steps) : null };
    numbers.replaceChildren(make("tr", {}, make("th", {}, "token"), ...names.map((name) => make("th", { scope: "col" }, name))),
      ...Object.entries(rows).map(([name, row]) => make("tr", {}, make("th", { scope: "row" }, name),
        ...names.map((_, x) => make("td", {}, row ? row[x].toFixed(3) : "")))));
    const exact = distance(target, p);
    const said = [`A draft token is accepted with probability ${beta.toFixed(3)}.`,
      exact < 1e-9 ? "The output has exactly the distribution p."
        : `The output does not have the distribution p: the total variation is ${exact.toFixed(3)}.`];
    if (steps) said.push(`After ${steps.toLocaleString("en")} steps ${(kept / steps).toFixed(3)} were accepted, and the sampled tokens `
      + `are at a total variation of ${distance(counts.map((n) => n / steps), p).toFixed(4)} from p; `
      + `chance alone gives about ${chance(p, steps).toFixed(4)}.`);
    if (single) said.push(`Last step: draft token ${names[last.drafted]}, u = ${last.u.toFixed(2)}, p/q = `
      + `${(p[last.drafted] / q[last.drafted]).toFixed(2)}: ${last.kept ? "accepted" : `rejected; replaced by ${names[last.token]}`}.`);
    status.textContent = said.join(" ");
  }
  const controls = make("div", { class: "controls" });
  for (const [letter, get, set] of [["p", () => p, (to) => (p = to)], ["q", () => q, (to) => (q = to)]]) {
    const sliders = names.map((name, x) => slider(`${letter}(${name})`, [0, 0.97, 0.01], get()[x], (value) => {
      set(moved(get(), x, value));
      sliders.forEach((other, y) => y === x || other.show(get()[y]));
      reset();
    }));
    controls.append(make("div", {}, ...sliders.map((one) => one.node)));
  }
  const rules = choice("after a rejection, sample from", RULES, (chosen) => ((rule = chosen), reset()));
  el.append(controls, rules.node, button("Step", () => run(1)), button("Run 1,000", () => run(1000)),
    button("Start again", reset), picture, status, numbers);
  reset();
}

function landscapeFigure(el) {
  const devices = Object.keys(RIDGES), own = "your own";
  let [alpha, c, gamma] = PRESETS["translation, T5-base"], batch = 1, device = "A100-80GB";
  const largest = 20, alphas = Array.from({ length: 18 }, (_, i) => (i + 2) / 20), batches = Array.from({ length: 11 }, (_, i) => 2 ** i);
  const curve = make("svg", { viewBox: "0 0 480 210", role: "img", "aria-label": "Speed-up against gamma; the text below has the numbers" });
  const map = make("svg", { viewBox: "0 0 480 235", role: "img", "aria-label": "The best gamma for each alpha and batch" });
  const status = make("p", { role: "status" });

  function draw() {
    const ridge = RIDGES[device], speeds = Array.from({ length: largest + 1 }, (_, g) => speedUp(alpha, g, c, batch, ridge));
    const best = bestGamma(alpha, c, batch, ridge, largest), top = Math.max(1.5, ...speeds) * 1.08;
    const x = (g) => 40 + 21 * g, y = (speed) => 180 - (170 * speed) / top;
    curve.replaceChildren(
      make("line", { x1: 40, x2: 460, y1: y(1), y2: y(1), stroke: COLOURS.muted, "stroke-dasharray": 4 }),
      make("path", { d: `M${speeds.map((speed, g) => `${x(g)} ${y(speed)}`).join("L")}`, fill: "none", stroke: COLOURS.target, "stroke-width": 2 }),
      make("circle", { cx: x(best), cy: y(speeds[best]), r: 7, fill: "none", stroke: COLOURS.accepted, "stroke-width": 3 }),
      make("circle", { cx: x(gamma), cy: y(speeds[gamma]), r: 4, fill: speeds[gamma] < 1 ? COLOURS.rejected : COLOURS.target }),
      ...[0, 5, 10, 15, 20].map((g) => written(x(g), 194, g)), written(250, 208, "gamma, draft tokens per step"),
      ...Array.from({ length: Math.floor(top) + 1 }, (_, s) => written(34, y(s) + 4, s, "end")),
      written(x(best), Math.max(12, y(speeds[best]) - 12), best ? `best: ${best}` : "off", best > 17 ? "end" : "middle"));
    map.replaceChildren(...batches.flatMap((rows, j) => alphas.map((a, i) => {
      const g = bestGamma(a, c, rows, ridge, largest), speed = speedUp(a, g, c, rows, ridge);
      const cell = make("g", {}, make("title", {}, `alpha ${a}, batch ${rows}: ${g ? `gamma ${g}, ${speed.toFixed(2)} times` : "off"}`),
        make("rect", { x: 40 + 24 * i, y: 185 - 18 * j, width: 23, height: 17, fill: g ? COLOURS.accepted : COLOURS.muted,
          "fill-opacity": g ? Math.min(0.9, 0.12 + (speed - 1) / 4) : 0.15 }),
        written(51.5 + 24 * i, 197.5 - 18 * j, g || "off"));
      if (rows === batch && Math.abs(a - alpha) <= 0.025) cell.append(make("rect", { x: 40 + 24 * i, y: 185 - 18 * j, width: 23, height: 17,
        fill: "none", stroke: "currentColor", "stroke-width": 2 }));
      cell.addEventListener("click", () => ((alpha = a), (batch = rows), changed()));
      return cell;
    })), ...batches.map((rows, j) => written(35, 197 - 18 * j, rows, "end")),
      ...alphas.filter((_, i) => i % 4 === 2).map((a) => written(51.5 + 24 * alphas.indexOf(a), 215, a)),
      written(256, 230, "alpha (upwards: batch); the number is the best gamma, off: plain decoding is faster"));
    const tokens = expectedTokens(alpha, gamma), v = verifyCost(gamma + 1, batch, ridge);
    status.textContent = `gamma ${gamma}: ${tokens.toFixed(2)} tokens per step take ${(gamma * c).toFixed(2)} (drafting) + ${v.toFixed(2)} (verifying) `
      + `target forward passes: ${speeds[gamma].toFixed(2)} times plain decoding${speeds[gamma] < 1 ? ", slower" : ""}. `
      + (best ? `The best gamma is ${best}${best === largest ? " or more" : ""}: ${speeds[best].toFixed(2)}.` : "Off: no gamma is faster than plain decoding.");
  }
  const sliders = {
    alpha: slider("alpha", [0, 0.99, 0.01], alpha, (value) => ((alpha = value), changed())),
    c: slider("c, cost of a draft token", [0, 0.5, 0.01], c, (value) => ((c = value), changed())),
    gamma: slider("gamma", [0, largest, 1], gamma, (value) => ((gamma = value), changed()), String),
    batch: slider("batch", [0, 10, 1], 0, (value) => ((batch = 2 ** value), changed()), (value) => String(2 ** value)),
  };
  const known = choice("start from", [own, ...Object.keys(PRESETS)], (name) => {
    if (name === own) return;
    [alpha, c, gamma] = PRESETS[name];
    batch = 1;
    changed(name);
  });
  const hardware = choice("device, for v(n)", devices, (name) => ((device = name), draw()));
  hardware.show(device);
  function changed(preset = own) {
    known.show(preset);
    sliders.alpha.show(alpha), sliders.c.show(c), sliders.gamma.show(gamma), sliders.batch.show(Math.log2(batch));
    draw();
  }
  el.append(make("div", { class: "controls" }, ...Object.values(sliders).map((one) => one.node), known.node, hardware.node), curve, status, map);
  changed("translation, T5-base");
}

const FIGURES = { residual: residualFigure, landscape: landscapeFigure };

function render({ model, el }) {
  const root = make("div", { class: "specnb-widget", "data-moves": "" }, make("style", {}, STYLE));
  FIGURES[model ? model.get("figure") : el.dataset.widget](root);
  el.replaceChildren(root);
}

export default { render };
