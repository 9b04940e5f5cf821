// Five figures that a reader moves: the residual of the acceptance rule, a recorded step, the evidence against a wrong
// rule, the speed-up over alpha and gamma, and the speed-up over settings.
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

const acceptance = (p, q, lenience = 1) => p.map((mass, x) => (q[x] > 0 ? Math.min(1, mass / (lenience * q[x])) : 1));

const mostLikely = (probs) => probs.map((_, x) => (x === probs.indexOf(Math.max(...probs)) ? 1 : 0));

// A rule: where draft tokens come from, the probability of accepting each, and what replaces a rejected one. The wrong
// ones have the names of the audit's alternatives.
export const RULES = {
  "exact: the residual": (p, q) => ({ draft: q, accept: acceptance(p, q), instead: residual(p, q) }),
  "no-residual: p after a rejection": (p, q) => ({ draft: q, accept: acceptance(p, q), instead: p }),
  "draft-leak: every draft token is accepted": (p, q) => ({ draft: q, accept: q.map(() => 1), instead: p }),
  "lenience 0.5: accepted with twice the probability": (p, q) =>
    ({ draft: q, accept: acceptance(p, q, 0.5), instead: residual(p, q) }),
  "greedy-draft: the argmax of q, tested as a sample": (p, q) =>
    ({ draft: mostLikely(q), accept: acceptance(p, q), instead: residual(p, q) }),
};
const NAMES = Object.keys(RULES);

// One draft token: sampled, tested, and after a rejection replaced.
export function step(rule, [draft, accept, final]) {
  const drafted = sample(rule.draft, draft);
  const kept = accept < rule.accept[drafted];
  return { drafted, kept, token: kept ? drafted : sample(rule.instead, final) };
}

// The distribution of the token that comes out.
export function emitted(rule) {
  const kept = rule.draft.map((mass, x) => mass * rule.accept[x]);
  return kept.map((mass, x) => mass + (1 - sum(kept)) * rule.instead[x]);
}

// Some of the audit's alternatives, each with the distributions r that it bets on, and how much is staked on a bet.
export const alternatives = (p, q) => ({
  "draft-leak": [q],
  "no-residual": [emitted(RULES[NAMES[1]](p, q))],
  "residual-only": [residual(p, q)],
  "greedy-draft": [emitted(RULES[NAMES[4]](p, q))],
  lenience: [0.9, 0.7, 0.5, 0.3].map((l) => emitted({ draft: q, accept: acceptance(p, q, l), instead: residual(p, q) })),
});
const STRENGTHS = [0.9, 0.5, 0.2, 0.06, 0.02];

// For every bet what a token adds to its logarithm, and the bet's weight.
export function betsOn(p, q) {
  const groups = Object.values(alternatives(p, q));
  return groups.flatMap((group) => group.flatMap((r) => STRENGTHS.map((stake) => ({
    gains: p.map((mass, x) => Math.log1p(stake * (r[x] / mass - 1))),
    weight: 1 / (groups.length * group.length * STRENGTHS.length) }))));
}

// The decimal logarithm of the e-value: the mean over all bets of the product of their factors, for these tokens.
export function evidence(bets, counts) {
  const logs = bets.map(({ gains, weight }) => Math.log(weight) + sum(counts.map((n, x) => n * gains[x])));
  const largest = Math.max(...logs);
  return (largest + Math.log(sum(logs.map((log) => Math.exp(log - largest))))) / Math.LN10;
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

// v(n) of specnb.theory.roofline without overlap: reading the weights takes as long as the arithmetic of `ridge` tokens.
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

// Tokens for which arithmetic takes as long as reading 16-bit weights, from data sheets (specnb_audit.predict_devices.GPUS).
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
.specnb-widget pre { white-space: pre-wrap; min-height: 9em; margin: 0.5rem 0; padding: 0.5rem; border: 1px solid ${COLOURS.muted}; }
.specnb-widget pre .accepted { color: ${COLOURS.accepted}; }
.specnb-widget pre .rejected { color: ${COLOURS.rejected}; text-decoration: line-through; }
.specnb-widget pre .unused { color: ${COLOURS.muted}; text-decoration: line-through; }
.specnb-widget pre .waiting { color: ${COLOURS.muted}; }
.specnb-widget pre .recovered, .specnb-widget pre .bonus { color: ${COLOURS.target}; font-weight: bold; }
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

const TOKENS = ["a", "b", "c", "d"];

// Two columns of sliders, for p and q; `now` has both and gets what is moved.
function distributions(now, least, moves) {
  const columns = ["p", "q"].map((letter) => {
    const sliders = now[letter].map((_, x) => slider(`${letter}(${TOKENS[x]})`, [least, 0.97, 0.01], now[letter][x], (value) => {
      now[letter] = moved(now[letter], x, value);
      sliders.forEach((other, y) => y === x || other.show(now[letter][y]));
      moves();
    }));
    return make("div", {}, ...sliders.map((one) => one.node));
  });
  return make("div", { class: "controls" }, ...columns);
}

const table = (rows, tokens = TOKENS) => [
  make("tr", {}, make("th", {}, "token"), ...tokens.map((name) => make("th", { scope: "col" }, name))),
  ...Object.entries(rows).map(([name, row]) => make("tr", {}, make("th", { scope: "row" }, name),
    ...tokens.map((_, x) => make("td", {}, row ? row[x].toFixed(3) : ""))))];

// Begins with the p and q that are recorded, of up to four tokens.
function residualFigure(el, recorded) {
  const now = recorded.p ? recorded : { p: [0.6, 0.3, 0.1], q: [0.3, 0.3, 0.4] }, tokens = TOKENS.slice(0, now.p.length);
  let rule = NAMES[0], counts, steps, kept, uniform, last;
  const picture = make("svg", { viewBox: "0 0 480 225", role: "img", "aria-label":
    "For each token a bar: accepted mass, on it residual mass up to p and rejected mass up to q; the table has the numbers" });
  const numbers = make("table"), status = make("p", { role: "status" });

  function reset() {
    [counts, steps, kept, uniform, last] = [tokens.map(() => 0), 0, 0, uniforms(1), null];
    draw();
  }
  function run(n) {
    for (let i = 0; i < n; i++) {
      const u = [uniform(), uniform(), uniform()];
      last = { u: u[1], ...step(RULES[rule](now.p, now.q), u) };
      counts[last.token] += 1;
      kept += last.kept;
      steps += 1;
    }
    draw(n === 1);
  }
  function draw(single = false) {
    const { p, q } = now, beta = sum(accepted(p, q)), target = emitted(RULES[rule](p, q));
    const top = Math.max(...p, ...q) * 1.1, y = (mass) => 200 - (185 * mass) / top;
    picture.replaceChildren(make("line", { x1: 30, x2: 470, y1: 200, y2: 200, stroke: COLOURS.muted }));
    tokens.forEach((name, x) => {
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
    numbers.replaceChildren(...table(rows, tokens));
    const exact = distance(target, p);
    const said = [`A draft token is accepted with probability ${beta.toFixed(3)}.`,
      exact < 1e-9 ? "The output has exactly the distribution p."
        : `The output does not have the distribution p: the total variation is ${exact.toFixed(3)}.`];
    if (steps) said.push(`After ${steps.toLocaleString("en")} steps ${(kept / steps).toFixed(3)} were accepted, and the sampled tokens `
      + `are at a total variation of ${distance(counts.map((n) => n / steps), p).toFixed(4)} from p; `
      + `chance alone gives about ${chance(p, steps).toFixed(4)}.`);
    if (single) said.push(`Last step: draft token ${TOKENS[last.drafted]}, u = ${last.u.toFixed(2)}, p/q = `
      + `${(p[last.drafted] / q[last.drafted]).toFixed(2)}: ${last.kept ? "accepted" : `rejected; replaced by ${TOKENS[last.token]}`}.`);
    status.textContent = said.join(" ");
  }
  const rules = choice("rule", NAMES.slice(0, 2), (chosen) => ((rule = chosen), reset()));
  el.append(distributions(now, 0, reset), rules.node, button("Step", () => run(1)), button("Run 1,000", () => run(1000)),
    button("Start again", reset), picture, status, numbers);
  reset();
}

function auditFigure(el) {
  const now = { p: [0.5, 0.25, 0.15, 0.1], q: [0.25, 0.3, 0.35, 0.1] }, LIMIT = 6;
  let rule = NAMES[1], counts, curve, found, uniform;
  const picture = make("svg", { viewBox: "0 0 480 170", role: "img", "aria-label":
    "For each token the target's probability, what the rule emits, and what was sampled; the table has the numbers" });
  const path = make("svg", { viewBox: "0 0 480 190", role: "img", "aria-label": "Evidence against the number of tokens; the text has the numbers" });
  const numbers = make("table"), status = make("p", { role: "status" });

  function reset() {
    [counts, curve, found, uniform] = [TOKENS.map(() => 0), [0], 0, uniforms(1)];
    draw();
  }
  function run(n) {
    const chosen = RULES[rule](now.p, now.q), bets = betsOn(now.p, now.q);
    for (let i = 0; i < n; i++) {
      counts[step(chosen, [uniform(), uniform(), uniform()]).token] += 1;
      curve.push(evidence(bets, counts));
      if (!found && curve.at(-1) >= LIMIT) found = curve.length - 1;
    }
    draw();
  }
  function draw() {
    const { p, q } = now, n = curve.length - 1, exact = emitted(RULES[rule](p, q));
    const sampled = n ? counts.map((count) => count / n) : null;
    const top = Math.max(...p, ...exact, ...(sampled ?? [])) * 1.1, y = (mass) => 150 - (140 * mass) / top;
    picture.replaceChildren(...TOKENS.flatMap((name, x) => {
      const at = 50 + 105 * x;
      const bar = (from, mass, colour) => make("rect", { x: from, width: 34, y: y(mass), height: 150 - y(mass), fill: colour });
      return [bar(at, p[x], COLOURS.target), bar(at + 36, exact[x], COLOURS.draft), written(at + 35, 166, name),
        ...(sampled ? [make("circle", { cx: at + 53, cy: y(sampled[x]), r: 5, fill: "black", stroke: "white", "stroke-width": 1.5 })] : [])];
    }), make("line", { x1: 30, x2: 470, y1: 150, y2: 150, stroke: COLOURS.muted }));
    const most = Math.ceil(curve.reduce((a, b) => Math.max(a, b), 9)), right = Math.max(200, n);
    const across = (at) => 40 + (420 * at) / right, high = (log) => 120 - (110 * Math.max(-0.25 * most, log)) / most;
    const every = Math.ceil(curve.length / 420), shown = curve.map((log, at) => [at, log]).filter(([at]) => at % every === 0 || at === n);
    path.replaceChildren(
      ...[0, LIMIT].map((log) => make("line", { x1: 40, x2: 460, y1: high(log), y2: high(log), stroke: log ? COLOURS.rejected : COLOURS.muted,
        "stroke-dasharray": log ? "5 3" : 0 })),
      make("path", { d: `M${shown.map(([at, log]) => `${across(at).toFixed(1)} ${high(log).toFixed(1)}`).join("L")}`, fill: "none",
        stroke: found ? COLOURS.rejected : COLOURS.target, "stroke-width": 2 }),
      ...[0, LIMIT, most].map((log) => written(34, high(log) + 4, log, "end")), written(456, high(LIMIT) + 13, "rejected from here on", "end"),
      ...[0, right / 2, right].map((at) => written(across(at), 170, Math.round(at).toLocaleString("en"), at === right ? "end" : "middle")),
      written(250, 186, "tokens (upwards: log10 of the e-value)"));
    numbers.replaceChildren(...table({ "p (blue)": p, q, "exact output of this rule (orange)": exact, "sampled (black dot)": sampled }));
    const said = [`This rule's output is at a total variation of ${distance(exact, p).toFixed(3)} from p.`];
    if (n) said.push(`After ${n.toLocaleString("en")} tokens the sampled ones are at ${distance(sampled, p).toFixed(4)}; chance alone gives about `
      + `${chance(p, n).toFixed(4)}. The e-value is 10^${curve.at(-1).toFixed(1)}: `
      + (found ? `exactness was rejected after ${found.toLocaleString("en")} tokens.` : "no rejection so far."));
    status.textContent = said.join(" ");
  }
  const rules = choice("rule", NAMES, (chosen) => ((rule = chosen), reset()));
  rules.show(rule);
  el.append(distributions(now, 0.01, reset), rules.node, button("1 token", () => run(1)), button("100 tokens", () => run(100)),
    button("1,000 tokens", () => run(1000)), button("Start again", reset), picture, path, status, numbers);
  reset();
}

// Steps of an answer, rows of data/results/real_steps.csv: draft tokens by their fate, the token that was sampled after
// them, and p and u of each draft token that was tested. Copied draft tokens have q = 1.
function stepFigure(el, rows) {
  const steps = rows.map((row) => {
    const [accepted, rejected, unused, sampled, tests] = ["accepted", "rejected", "unused", "sampled", "tests"]
      .map((name) => JSON.parse(row[name] || "null"));
    const draft = [...accepted, ...(rejected === null ? [] : [rejected]), ...unused];
    return { draft, kept: accepted.length, tests, sampled, fate: rejected === null ? "bonus" : "recovered",
      emitted: [...accepted, sampled ?? ""].join("") };
  });
  let number = 0, tested = 0;
  const answer = make("pre"), numbers = make("table"), status = make("p", { role: "status" });
  const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const span = (text, fate) => make("span", { class: fate }, text);

  function draw() {
    const { draft, kept, tests, sampled, fate } = steps[number], ended = tested === tests.length;
    const fateOf = (i) => (i < tested ? (i < kept ? "accepted" : "rejected") : ended ? "unused" : "waiting");
    answer.replaceChildren(span(steps.slice(0, number).map((one) => one.emitted).join(""), "before"),
      ...draft.map((token, i) => span(visible(token), fateOf(i))), ...(ended ? [span(visible(sampled ?? ""), fate)] : []));
    const cells = (i) => (i < tested ? [...tests[i].map((value) => value.toFixed(3)), i < kept ? "u < p/q: accepted" : "u ≥ p/q: rejected"]
      : ["", "", ended ? "not tested" : "waiting"]);
    const row = (kind, [first, ...others]) => make("tr", {}, make("th", { scope: kind }, first), ...others.map((cell) => make("td", {}, cell)));
    numbers.replaceChildren(row("col", ["draft token", "q", "p", "u", "test"]), ...draft.map((token, i) => row("row", [visible(token), "1", ...cells(i)])));
    const next = { bonus: "then a token from p", recovered: "then a token from the residual" }[fate];
    status.textContent = `Step ${number + 1} of ${steps.length}: ${draft.length} draft tokens, ${tested} tested`
      + (ended ? `, ${kept} accepted; ${sampled === null ? "the answer ends" : `${next}: ${visible(sampled)}`}.` : ".");
  }
  function go(to) {
    [number, tested] = [Math.max(0, Math.min(steps.length - 1, to)), 0];
    shown.show(number + 1);
    draw();
  }
  function next() {
    if (tested === steps[number].tests.length) return go(number + 1);
    tested += 1;
    draw();
  }
  const shown = slider("step", [1, steps.length, 1], 1, (value) => go(value - 1), String);
  el.append(shown.node, button("Next test", next), button("Next step with a draft", () => {
    const later = steps.findIndex(({ draft }, i) => i > number && draft.length);
    go(later < 0 ? steps.length - 1 : later);
  }), answer, status, numbers);
  draw();
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
      written(256, 230, "alpha (upwards: batch); numbers: the best gamma; off: no gamma is faster"));
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

// The speed-up of Theorem 3.8 over alpha and gamma for one c; a marker at the chosen place.
function heatmapFigure(el) {
  const largest = 16, alphas = Array.from({ length: 20 }, (_, i) => i / 20), free = [1, Infinity];
  let [alpha, gamma, c] = [0.8, 5, 0.05];
  const map = make("svg", { viewBox: "0 0 480 330", role: "img", "aria-label": "Speed-up for each alpha and gamma; the text below has the numbers" });
  const status = make("p", { role: "status" });

  function draw() {
    const x = (a) => 40 + 440 * a, y = (g) => 282 - 16 * g, at = (a, g) => speedUp(a, g, c, ...free);
    map.replaceChildren(...alphas.flatMap((a) => Array.from({ length: largest + 1 }, (_, g) => {
      const speed = at(a, g), gains = speed >= 1;
      const cell = make("rect", { x: x(a) - 10, y: y(g) - 7.5, width: 21, height: 15, fill: gains ? COLOURS.accepted : COLOURS.rejected,
        "fill-opacity": Math.min(0.9, gains ? (speed - 1) / 4 : 1 - speed) });
      cell.append(make("title", {}, `alpha ${a}, gamma ${g}: ${speed.toFixed(2)} times`));
      cell.addEventListener("click", () => ((alpha = a), (gamma = g), changed()));
      return cell;
    })),
      ...alphas.map((a) => make("circle", { cx: x(a), cy: y(bestGamma(a, c, ...free, largest)), r: 2.5, fill: "currentColor" })),
      make("circle", { cx: x(alpha), cy: y(gamma), r: 7, fill: "none", stroke: COLOURS.target, "stroke-width": 3 }),
      ...[0, 4, 8, 12, 16].map((g) => written(26, y(g) + 4, g, "end")), ...[0, 0.2, 0.4, 0.6, 0.8].map((a) => written(x(a), 304, a)),
      written(256, 322, "alpha (upwards: gamma); green: faster than plain decoding, orange: slower; dots: the best gamma"));
    const best = bestGamma(alpha, c, ...free, largest), tokens = expectedTokens(alpha, gamma), speed = at(alpha, gamma);
    status.textContent = `alpha ${alpha.toFixed(2)}, gamma ${gamma}: ${tokens.toFixed(2)} tokens per step over ${(gamma * c + 1).toFixed(2)} target passes, `
      + `${speed.toFixed(2)} times plain decoding. `
      + (best ? `The best gamma is ${best}${best === largest ? " or more" : ""}: ${at(alpha, best).toFixed(2)}.` : "No gamma is faster than plain decoding.");
  }
  const sliders = {
    alpha: slider("alpha", [0, 0.95, 0.01], alpha, (value) => ((alpha = value), draw())),
    gamma: slider("gamma", [0, largest, 1], gamma, (value) => ((gamma = value), draw()), String),
    c: slider("c, cost of a draft token", [0, 0.5, 0.01], c, (value) => ((c = value), draw())),
  };
  function changed() {
    sliders.alpha.show(alpha), sliders.gamma.show(gamma);
    draw();
  }
  el.append(make("div", { class: "controls" }, ...Object.values(sliders).map((one) => one.node)), map, status);
  changed();
}

const FIGURES = { residual: residualFigure, step: stepFigure, audit: auditFigure, heatmap: heatmapFigure, landscape: landscapeFigure };

function render({ model, el }) {
  const root = make("div", { class: "specnb-widget" }, make("style", {}, STYLE));
  const { widget, recorded } = model ? { widget: model.get("figure"), recorded: model.get("recorded") } : el.dataset;
  FIGURES[widget](root, JSON.parse(recorded || "[]"));
  el.replaceChildren(root);
  // JupyterLab takes arrow keys for its own commands before any element sees them; in a figure they move a slider.
  const own = (event) => root.contains(event.target) && event.stopPropagation();
  window.addEventListener("keydown", own, { capture: true });
  return () => window.removeEventListener("keydown", own, { capture: true });
}

export default { render };
