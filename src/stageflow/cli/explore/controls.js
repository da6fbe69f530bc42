// Settings in, everything else out. The settings live in the address, so that a view can be shared.

const embedded = (id) => JSON.parse(document.getElementById(id).textContent);
const SLIDERS = embedded("sliders");
const DEFAULTS = { schedule: "1f1b" };
for (const name in SLIDERS) DEFAULTS[name] = SLIDERS[name].start;
const START = { ...DEFAULTS, ...embedded("start") };
const $ = (id) => document.getElementById(id);

const settings = { ...START, ...readAddress() };
const timeline = new Timeline($("timeline"), $("scroll"), $("spacer"), $("detail"), $("play"));
let comparing = 0;

// Only what makes sense is taken from the address.
function readAddress() {
  const found = {};
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    const slider = SLIDERS[name], value = Number(text);
    if (name === "schedule" && text in SCHEDULES) found.schedule = text;
    else if (slider && text && value >= slider.least && value <= slider.most) found[name] = value;
  }
  return found;
}

function writeAddress() {
  const changed = Object.entries(settings).filter(([name, value]) => value !== START[name]);
  const words = changed.map(([name, value]) => `${name}=${value}`).join("&");
  history.replaceState(null, "", words ? `#${words}` : location.pathname + location.search);
}

// One step: a schedule for the settings, simulated. most: the top of all memory charts.
function stepOf(name, { devices, microbatches, chunks, f, i, w, hop, transfer, memory }) {
  const [fewest, largest] = SCHEDULES[name].chunks, v = Math.min(largest, Math.max(fewest, chunks));
  const costs = stageCosts({ f, i, w, hop, transfer }, v), limit = memory * v;
  const schedule = buildSchedule(name, { devices, microbatches, chunks: v, costs, limit });
  const result = simulate(schedule, costs), peak = Math.max(...result.peaks);
  const most = limit && limit <= 2 * peak ? Math.max(peak, limit) : peak;
  return { schedule, result, costs, limit, most, bound: lowerBound(schedule, costs) };
}

function update() {
  const step = stepOf(settings.schedule, settings), { chunks } = SCHEDULES[settings.schedule];
  const { f, i, w } = settings;
  for (const name in SLIDERS) {
    const value = name === "chunks" ? step.schedule.chunks : settings[name];
    for (const input of [$(name), $(`${name}-number`)]) {
      if (document.activeElement !== input || Number(input.value) !== value) input.value = value;
      if (name === "chunks") input.disabled = chunks[0] === chunks[1];
    }
  }
  $("schedule").value = settings.schedule;
  $("says").textContent = `${SCHEDULES[settings.schedule].says} ${SCHEDULES[settings.schedule].source}.`;
  $("ratio").textContent = `B, a whole backward, is I + W: ${short(i + w)}, ${short((i + w) / f)} × F.`;
  showFigures($("figures"), step);
  showLegend($("legend"), step.schedule);
  showDevices($("per-device"), step);
  timeline.show(step);
  $("timeline").setAttribute("aria-label", summary(step));
  writeAddress();
  clearTimeout(comparing);
  comparing = setTimeout(compare, 100);
}

// One schedule at a time, so that the page answers in between; a change starts anew.
function compare(steps = []) {
  const name = Object.keys(SCHEDULES)[steps.length];
  if (name === undefined) showComparison($("compare"), steps, settings.schedule, (chosen) => change({ schedule: chosen }));
  else comparing = setTimeout(() => compare([...steps, stepOf(name, settings)]));
}

function summary(step) {
  const { makespan, bubble, peak } = figuresOf(step), { name, devices, microbatches } = step.schedule;
  return `Timeline of ${name} on ${devices} devices with ${microbatches} micro-batches: step time ${short(makespan)}, ` +
    `bubble ${percent(bubble)}, peak memory ${short(peak)} activations`;
}

function change(wanted, lesson = -1) {
  Object.assign(settings, wanted);
  [...$("lessons").querySelectorAll("button")].forEach((button, n) => {
    if (n === lesson) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  $("lesson").hidden = lesson < 0;
  if (lesson >= 0) $("lesson").textContent = LESSONS[lesson][1];
  update();
}

function makeSlider(name) {
  const { label, words, least, most, by } = SLIDERS[name], bounds = { min: least, max: most, step: by };
  const take = (event) => {
    const value = Number(event.target.value);
    if (event.target.value === "" || !Number.isFinite(value)) return;
    const whole = Math.min(most, Math.max(least, Math.round(value / by) * by));
    Object.assign(settings, { [name]: Number(whole.toFixed(6)) });
    update();
  };
  return element("div", { class: "slider" },
    element("label", { for: name, title: words }, label),
    element("input", { id: name, type: "range", "aria-description": words, ...bounds, oninput: take }),
    element("input", { id: `${name}-number`, type: "number", "aria-label": words, ...bounds, onchange: take }));
}

for (const group of document.querySelectorAll("[data-sliders]"))
  group.append(...group.dataset.sliders.split(" ").map(makeSlider));
for (const [words, split] of [["Whole backward", false], ["Split backward", true]]) {
  const names = Object.keys(SCHEDULES).filter((name) => SCHEDULES[name].split === split);
  $("schedule").append(element("optgroup", { label: words }, ...names.map((name) => element("option", { value: name }, name))));
}
$("schedule").addEventListener("change", (event) => change({ schedule: event.target.value }));
$("lessons").append(...LESSONS.map(([name, , wanted], n) => element("li", {},
  element("button", { type: "button", onclick: () => change({ ...DEFAULTS, ...wanted }, n) }, `${n + 1} ${name}`))));
$("controls").addEventListener("reset", (event) => { event.preventDefault(); change(START); });
$("controls").addEventListener("submit", (event) => event.preventDefault());
const ZOOMS = { in: 1.5, out: 1 / 1.5, all: 0 };
for (const button of document.querySelectorAll("[data-zoom]"))
  button.addEventListener("click", () => timeline.resize(timeline.zoom * ZOOMS[button.dataset.zoom]));
addEventListener("hashchange", () => change({ ...START, ...readAddress() }));
update();
