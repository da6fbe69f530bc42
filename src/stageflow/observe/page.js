// Zoom and pan the timeline, and follow one micro-batch under the pointer. Without this script the page still reads.
"use strict";
const picture = document.querySelector(".stage svg.stageflow-timeline");
const plot = picture.querySelector("svg.plot");
const axis = plot.querySelector(".axis");
const blocks = [...plot.querySelectorAll(".ev")].map((g) => {
  const title = g.querySelector("title");
  g.dataset.tip = title.textContent;
  title.remove();
  return { rect: g.querySelector("rect"), text: g.querySelector("text"), start: +g.dataset.s, end: +g.dataset.e };
});
const length = +picture.dataset.length, factor = +picture.dataset.factor, unit = picture.dataset.unit;
const [, , , height] = picture.getAttribute("viewBox").split(" ").map(Number);
const left = +plot.getAttribute("x");
const svgNames = "http://www.w3.org/2000/svg";
let from = 0, to = length, width = 0, waiting = false;

function draw() {
  waiting = false;
  const full = Math.max(480, picture.getBoundingClientRect().width);
  width = full - left - 12;
  picture.setAttribute("viewBox", `0 0 ${full} ${height}`);
  plot.setAttribute("width", width);
  const scale = width / (to - from);
  for (const { rect, text, start, end } of blocks) {
    const x = (start - from) * scale, size = Math.max(0.6, (end - start) * scale);
    rect.setAttribute("x", x);
    rect.setAttribute("width", size);
    if (!text) continue;
    const shown = Math.min(x + size, width) - Math.max(x, 0);
    text.setAttribute("x", Math.max(x, 0) + shown / 2);
    const font = Math.min(11.5, (shown - 1.5) / (0.62 * text.textContent.length));
    text.setAttribute("font-size", font);
    if (font >= 6.5) text.removeAttribute("display"); else text.setAttribute("display", "none");
  }
  drawAxis(scale);
}

function drawAxis(scale) {
  const rough = ((to - from) / factor) / Math.max(3, width / 95);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const bottom = +axis.dataset.y, marks = [];
  for (let i = Math.ceil(from / factor / step - 1e-9); i * step * factor <= to * (1 + 1e-12); i++) {
    const x = (i * step * factor - from) * scale;
    const line = document.createElementNS(svgNames, "line"), text = document.createElementNS(svgNames, "text");
    Object.entries({ x1: x, x2: x, y1: 0, y2: bottom + 4 }).forEach(([k, v]) => line.setAttribute(k, v));
    text.setAttribute("x", x);
    text.setAttribute("y", bottom + 16);
    if (x < 12) text.setAttribute("class", "first");
    else if (x > width - 24) text.setAttribute("class", "last");
    text.textContent = `${(i * step).toFixed(digits)} ${unit}`.trim();
    marks.push(line, text);
  }
  axis.replaceChildren(...marks);
}

function show(a, b) {
  const least = length / 1e5, span = Math.min(length, Math.max(least, b - a));
  from = Math.min(Math.max(0, a), length - span);
  to = from + span;
  if (!waiting) { waiting = true; requestAnimationFrame(draw); }
}
function zoom(by, at = (from + to) / 2) { show(at - (at - from) * by, at + (to - at) * by); }
function pan(share) { const d = (to - from) * share; show(from + d, to + d); }
function timeAt(x) { return from + (x - picture.getBoundingClientRect().left - left) / width * (to - from); }

plot.addEventListener("wheel", (e) => {
  e.preventDefault();
  if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) pan((e.deltaX || e.deltaY) / 1000);
  else zoom(Math.exp(e.deltaY / 500), timeAt(e.clientX));
}, { passive: false });
plot.addEventListener("dblclick", () => show(0, length));
let held = null;
plot.addEventListener("pointerdown", (e) => { held = { x: e.clientX, from, to }; });
addEventListener("pointermove", (e) => {
  if (!held) return;
  plot.classList.add("held");
  const d = (held.x - e.clientX) / width * (held.to - held.from);
  show(held.from + d, held.to + d);
});
addEventListener("pointerup", () => { held = null; plot.classList.remove("held"); });
addEventListener("keydown", (e) => {
  const act = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": () => show(0, length),
    ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1) }[e.key];
  if (act && !e.ctrlKey && !e.metaKey) { e.preventDefault(); act(); }
});
for (const button of document.querySelectorAll(".tools button"))
  button.addEventListener("click", () => ({ in: () => zoom(0.6), out: () => zoom(1 / 0.6), all: () => show(0, length) })[button.value]());

const tip = document.getElementById("tip"), dim = document.getElementById("dim");
plot.addEventListener("pointermove", (e) => {
  const g = held ? null : e.target.closest(".ev");
  tip.hidden = !g;
  const follow = g && g.dataset.m >= 0 ? `.plot .ev:not([data-m="${g.dataset.m}"]) { opacity: 0.22; }` : "";
  if (dim.textContent !== follow) dim.textContent = follow;
  if (!g) return;
  tip.textContent = g.dataset.tip;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(e.clientX + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${e.clientY + 18 + box.height > innerHeight ? e.clientY - box.height - 10 : e.clientY + 18}px`;
});
plot.addEventListener("pointerleave", () => { tip.hidden = true; dim.textContent = ""; });
addEventListener("resize", () => show(from, to));
document.querySelector(".tools").hidden = false;
draw();
