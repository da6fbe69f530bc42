// Figures and tables beside the picture.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name in made && typeof value === "function") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const span = ({ schedule, result }) => Math.max(...schedule.orders.map((order) =>
  result.end[order[order.length - 1]] - result.start[order[0]]));

// Figures of one step, in the units that people read: activations of a device rather than of a stage.
function figuresOf(step) {
  const { schedule, result, bound, limit } = step, peak = Math.max(...result.peaks);
  return {
    makespan: result.makespan, bubble: result.bubble, span: span(step), bound, gap: result.makespan / bound - 1,
    peak: peak / schedule.chunks, over: limit > 0 && peak > limit,
  };
}

function showFigures(place, step) {
  const { makespan, bubble, bound, gap, peak, over } = figuresOf(step);
  const limit = step.limit / step.schedule.chunks;
  const rows = [
    ["Step time", short(makespan), `span ${short(span(step))}`],
    ["Bubble", percent(bubble), "of all time"],
    ["Memory", short(peak), limit ? (over ? `over ${limit}` : `of ${limit}`) : "activations", over],
    ["Bound", short(bound), gap < 5e-4 ? "reached" : `step +${percent(gap)}`],
  ];
  place.replaceChildren(...rows.map(([name, value, also, bad]) => element("div", {},
    element("dt", {}, name),
    element("dd", { class: `value${bad ? " bad" : ""}` }, value),
    element("dd", { class: `also${bad ? " bad" : ""}` }, also))));
}

function showLegend(place, schedule) {
  const kinds = schedule.split ? [["F", "F forward"], ["I", "I input gradients"], ["W", "W weight gradients"]]
    : [["F", "F forward"], ["B", "B backward"]];
  const gaps = [["warm-up", "warm-up"], ["waiting", "waiting for data"], ["transfer", "value on a link"], ["drain", "drain"]];
  const keys = [...kinds, ...gaps, ["memory", "memory"]].map(([name, words]) =>
    element("li", {}, element("i", { style: `background:var(--${name})` }), words));
  const paler = schedule.chunks > 1 ? [element("li", {}, "fainter: a device’s later stages")] : [];
  place.replaceChildren(...keys, element("li", {}, element("i", { class: "line" }), "lower bound"), ...paler);
}

function header(...names) {
  const cells = names.map((name) => element("th", { scope: "col", class: name.startsWith("<") ? "left" : null },
    name.replace("<", "")));
  return element("thead", {}, element("tr", {}, ...cells));
}

function showDevices(table, step) {
  const { schedule, result, most, limit } = step, { chunks } = schedule;
  const part = (name, seconds) => element("i", { style:
    `width:${(100 * seconds) / result.makespan}%;background:var(--${name})` });
  const rows = result.busy.map((busy, device) => {
    const shares = CAUSES.map((cause, n) => part(cause, result.idle[device][n]));
    const peak = result.peaks[device], over = limit > 0 && peak > limit;
    const mark = limit && limit <= most ? [element("i", { class: "limit", style: `left:${(100 * limit) / most}%` })] : [];
    return element("tr", {},
      element("th", { scope: "row" }, `device ${device}`),
      element("td", { class: "chart" }, element("div", { class: "stack", "aria-hidden": "true" }, part("F", busy), ...shares)),
      element("td", {}, percent(busy / result.makespan)),
      element("td", { class: "chart small" }, element("div", { class: "stack", "aria-hidden": "true" },
        element("i", { style: `width:${(100 * peak) / most}%;background:var(--${over ? "bad" : "memory"})` }), ...mark)),
      element("td", { class: over ? "bad" : null }, short(peak / chunks)),
      ...CAUSES.map((_, n) => element("td", {}, short(result.idle[device][n]))));
  });
  table.replaceChildren(header("device", "<where its time goes", "work", "<memory", "peak", ...CAUSES),
    element("tbody", {}, ...rows));
}

function showComparison(table, steps, chosen, choose) {
  const figures = steps.map(figuresOf), fit = figures.filter((each) => !each.over);
  const least = Math.min(...fit.map((each) => each.makespan)), longest = Math.max(...figures.map((each) => each.makespan));
  const rows = steps.map(({ schedule }, n) => {
    const { makespan, bubble, span, peak, over, gap } = figures[n], { name, chunks } = schedule;
    return element("tr", { "aria-current": name === chosen ? "true" : null },
      element("th", { scope: "row" }, element("button", { type: "button", onclick: () => choose(name) }, name)),
      element("td", { class: "chart small" }, element("div", { class: "stack", "aria-hidden": "true" },
        element("i", { style: `width:${(100 * makespan) / longest}%;background:var(--F)` }))),
      element("td", { class: !over && makespan <= least * (1 + 1e-9) ? "best" : null }, short(makespan)),
      element("td", {}, short(span)),
      element("td", {}, percent(bubble)),
      element("td", { class: over ? "bad" : null }, `${short(peak)}${over ? " over" : ""}`),
      element("td", {}, gap < 5e-4 ? "0" : percent(gap)),
      element("td", {}, `${chunks}`));
  });
  table.replaceChildren(
    header("schedule", "<", "step", "span", "bubble", "memory", "above bound", "stages each"),
    element("tbody", {}, ...rows));
}
