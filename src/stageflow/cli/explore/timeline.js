// The picture: a lane per device with its actions, what it keeps below, and where the time between went.

const GUTTER = 74, AXIS = 24, PLAY_MS = 8000, GAP_COLOURS = ["--warm-up", "--waiting", "--transfer", "--drain"];

class Timeline {
  constructor(canvas, scroll, spacer, detail, player) {
    Object.assign(this, { canvas, scroll, spacer, detail, player, zoom: 1, chosen: -1, pointed: -1, drawing: false });
    this.now = Infinity;
    player.addEventListener("click", () => (this.now < Infinity ? this.stop() : this.play()));
    scroll.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(scroll);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    canvas.addEventListener("pointermove", (e) => this.point(this.at(e)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("click", (e) => this.choose(this.at(e)));
    canvas.addEventListener("keydown", (e) => this.key(e));
  }

  show(step) {
    const { schedule } = step, sizes = [[4, 30, 18, 10], [8, 26, 12, 8], [16, 18, 7, 4], [Infinity, 11, 4, 3]];
    [, this.lane, this.strip, this.space] = sizes.find(([devices]) => schedule.devices <= devices);
    this.pitch = this.lane + this.strip + this.space;
    this.step = step;
    this.stop();
    this.chosen = this.pointed = -1;
    this.redraw();
    this.tell();
  }

  // Let the step pass by: what is later than now is not drawn.
  play() {
    const begin = performance.now(), end = this.step.result.makespan;
    const tick = (time) => {
      if (this.now === Infinity) return;
      this.now = Math.max(0, (end * (time - begin)) / PLAY_MS);
      if (this.now >= end) return this.stop();
      const x = this.now * this.scale;
      if (x > this.scroll.scrollLeft + this.width) this.scroll.scrollLeft = x - this.width / 8;
      this.draw();
      requestAnimationFrame(tick);
    };
    this.now = 0;
    this.scroll.scrollLeft = 0;
    this.player.textContent = "Stop";
    requestAnimationFrame(tick);
  }

  stop() {
    this.now = Infinity;
    this.player.textContent = "Play";
    this.redraw();
  }

  resize(zoom) {
    const middle = (this.scroll.scrollLeft + this.width / 2) / this.zoom;
    this.zoom = Math.min(40, Math.max(1, zoom));
    this.spacer.style.width = `${100 * this.zoom}%`;
    this.scroll.scrollLeft = middle * this.zoom - this.width / 2;
    this.redraw();
  }

  redraw() {
    if (this.drawing || !this.step) return;
    this.drawing = true;
    requestAnimationFrame(() => { this.drawing = false; this.draw(); });
  }

  // A colour of the style sheet, looked up once per drawing.
  colour(name) {
    if (!this.colours.has(name)) this.colours.set(name, this.style.getPropertyValue(name).trim());
    return this.colours.get(name);
  }

  draw() {
    const { canvas, step } = this, full = this.scroll.clientWidth;
    const height = step.schedule.devices * this.pitch + AXIS, ratio = devicePixelRatio || 1;
    this.style = getComputedStyle(document.documentElement);
    this.colours = new Map();
    this.width = full - GUTTER - 6;
    this.scale = (this.width * this.zoom) / step.result.makespan;
    this.from = this.scroll.scrollLeft / this.scale;
    canvas.style.width = `${full}px`;
    canvas.style.height = `${height}px`;
    canvas.width = full * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "600 11px ui-sans-serif, system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width + 6, height);
    pen.clip();
    this.drawAxis(pen, height);
    pen.beginPath();
    pen.rect(GUTTER, 0, Math.min(this.width + 6, Math.max(0, this.x(this.now) - GUTTER)), height - AXIS);
    pen.clip();
    step.schedule.orders.forEach((order, device) => this.drawLane(pen, order, device));
    this.drawBound(pen, height);
    pen.restore();
    this.drawNames(pen);
  }

  x(time) { return GUTTER + (time - this.from) * this.scale; }

  drawAxis(pen, height) {
    const rough = (80 / this.scale) || 1, power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((k) => k * power).find((t) => t >= rough), end = this.step.result.makespan;
    pen.strokeStyle = this.colour("--rule");
    pen.fillStyle = this.colour("--soft");
    for (let n = Math.ceil(this.from / tick); n * tick <= end * (1 + 1e-9); n++) {
      const x = this.x(n * tick);
      if (x > GUTTER + this.width + 20) break;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, height - AXIS + 3);
      pen.stroke();
      pen.textAlign = x < GUTTER + 8 ? "left" : x > GUTTER + this.width - 12 ? "right" : "center";
      pen.fillText(`${+(n * tick).toPrecision(6)}`, x, height - AXIS / 2 + 2);
    }
  }

  drawLane(pen, order, device) {
    const { schedule, result } = this.step, { numbering } = schedule, top = device * this.pitch;
    const right = GUTTER + this.width + 6, marked = this.marked();
    for (const [from, to, cause] of result.gaps[device]) {
      pen.fillStyle = this.colour(GAP_COLOURS[cause]);
      pen.fillRect(this.x(from), top + 3, (to - from) * this.scale, this.lane - 6);
    }
    for (const code of order) {
      const x = this.x(result.start[code]), size = (result.end[code] - result.start[code]) * this.scale;
      if (x + size < GUTTER || x > right) continue;
      this.drawAction(pen, code, x, top, size, marked >= 0 && numbering.microbatch(code) !== marked);
    }
    this.drawMemory(pen, device, top + this.lane + 1);
  }

  drawAction(pen, code, x, top, size, faded) {
    const { numbering, devices } = this.step.schedule, kind = KINDS[numbering.kind(code)];
    const chunk = Math.floor(numbering.stage(code) / devices), inset = Math.min(1, size / 8);
    pen.globalAlpha = (faded ? 0.22 : 1) * (1 - 0.2 * chunk);
    pen.fillStyle = this.colour(`--${kind}`);
    pen.fillRect(x, top, Math.max(0.6, size - inset), this.lane);
    pen.globalAlpha = 1;
    if (code === this.chosen) {
      pen.strokeStyle = this.colour("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, top + 1, Math.max(2, size - inset - 2), this.lane - 2);
      pen.lineWidth = 1;
    }
    const text = `${numbering.microbatch(code)}`;
    if (faded || this.lane < 11 || size < 6.6 * text.length + 3) return;
    pen.fillStyle = kind === "F" || kind === "W" ? "#fff" : "#1c1408";
    pen.textAlign = "center";
    pen.fillText(text, x + size / 2, top + this.lane / 2 + 0.5);
  }

  // A bar for each level that the device keeps, red where that is over the limit.
  drawMemory(pen, device, top) {
    const { result, limit, most } = this.step, steps = result.memory[device], bottom = top + this.strip;
    const end = this.x(result.makespan), height = (level) => (this.strip * level) / most;
    steps.forEach(([time, level], n) => {
      const from = Math.floor(this.x(time)), to = Math.ceil(n + 1 < steps.length ? this.x(steps[n + 1][0]) : end);
      pen.fillStyle = this.colour(limit && level > limit ? "--bad" : "--memory");
      pen.fillRect(from, bottom - Math.max(1, height(level)), Math.min(to, end) - from, Math.max(1, height(level)));
    });
    if (!limit || limit > most || this.strip < 10) return;
    pen.strokeStyle = this.colour("--bad");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(this.x(0), bottom - height(limit) + 0.5);
    pen.lineTo(end, bottom - height(limit) + 0.5);
    pen.stroke();
    pen.setLineDash([]);
  }

  drawBound(pen, height) {
    const x = this.x(this.step.bound);
    pen.strokeStyle = this.colour("--bound");
    pen.setLineDash([5, 4]);
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(Math.min(x, GUTTER + this.width * this.zoom), 0);
    pen.lineTo(Math.min(x, GUTTER + this.width * this.zoom), height - AXIS + 3);
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
  }

  drawNames(pen) {
    const { schedule } = this.step, two = this.lane + this.strip >= 26;
    stagesOf(schedule.placement, schedule.devices).forEach((local, device) => {
      const middle = device * this.pitch + this.lane / 2;
      pen.textAlign = "left";
      pen.fillStyle = this.colour("--ink");
      pen.font = `600 ${this.lane < 14 ? 10 : 12}px ui-sans-serif, system-ui, sans-serif`;
      pen.fillText(`device ${device}`, 0, middle - (two ? 2 : 0));
      if (!two) return;
      pen.fillStyle = this.colour("--soft");
      pen.font = "10.5px ui-sans-serif, system-ui, sans-serif";
      pen.fillText(`stage${local.length > 1 ? "s" : ""} ${local.join(" ")}`, 0, middle + 12);
    });
  }

  // The action under the pointer, or -1.
  at(event) {
    const box = this.canvas.getBoundingClientRect(), { schedule, result } = this.step;
    const device = Math.floor((event.clientY - box.top) / this.pitch), x = event.clientX - box.left;
    if (x < GUTTER || device >= schedule.devices) return -1;
    const time = this.from + (x - GUTTER) / this.scale;
    return schedule.orders[device].find((code) => result.start[code] <= time && time < result.end[code]) ?? -1;
  }

  // The micro-batch to follow, or -1.
  marked() {
    const code = this.pointed >= 0 ? this.pointed : this.chosen;
    return code < 0 ? -1 : this.step.schedule.numbering.microbatch(code);
  }

  point(code) {
    if (code === this.pointed) return;
    this.pointed = code;
    this.redraw();
    this.tell();
  }

  choose(code) {
    this.chosen = code === this.chosen ? -1 : code;
    this.reveal();
    this.redraw();
    this.tell();
  }

  // Scroll so that the chosen action can be seen.
  reveal() {
    if (this.chosen < 0) return;
    const { start, end } = this.step.result, left = start[this.chosen] * this.scale, right = end[this.chosen] * this.scale;
    if (left < this.scroll.scrollLeft) this.scroll.scrollLeft = left - 20;
    else if (right > this.scroll.scrollLeft + this.width) this.scroll.scrollLeft = right - this.width + 20;
  }

  key(event) {
    const zooms = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, 0: 0 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in zooms) this.resize(this.zoom * zooms[event.key]);
    else if (event.key === " ") this.player.click();
    else if (event.key === "Escape") this.choose(this.chosen);
    else if (event.key.startsWith("Arrow")) this.choose(this.neighbour(event.key));
    else return;
    event.preventDefault();
  }

  neighbour(key) {
    const { schedule, result } = this.step, { orders, numbering, placement } = schedule;
    if (this.chosen < 0) return orders[0][0];
    const device = placement[numbering.stage(this.chosen)], order = orders[device];
    const place = order.indexOf(this.chosen) + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 0, ArrowDown: 0 }[key];
    if (key === "ArrowLeft" || key === "ArrowRight") return order[Math.min(order.length - 1, Math.max(0, place))];
    const other = Math.min(orders.length - 1, Math.max(0, device + (key === "ArrowUp" ? -1 : 1)));
    const time = result.start[this.chosen];
    return orders[other].reduce((a, b) => (Math.abs(result.start[b] - time) < Math.abs(result.start[a] - time) ? b : a));
  }

  tell() {
    const code = this.pointed >= 0 ? this.pointed : this.chosen;
    this.detail.textContent = code < 0
      ? "Point at an action, tap it, or use the arrow keys: it says what it is and what it waited for."
      : describe(this.step, code);
  }
}
