// List scheduling as in stageflow.schedule.builders.greedy: gradients before forwards, the stage nearest to the output
// first, gradients of weights when nothing else can start.

const RANK = [1, 0, 0, 2];

// Times at which to look at a device again, earliest first.
class Looks {
  constructor() { this.heap = []; }
  get size() { return this.heap.length; }
  static before(a, b) { return a.time < b.time || (a.time === b.time && a.device < b.device); }
  push(time, device) {
    const heap = this.heap, look = { time, device };
    let at = heap.length;
    for (; at > 0; at = (at - 1) >> 1) {
      const parent = heap[(at - 1) >> 1];
      if (!Looks.before(look, parent)) break;
      heap[at] = parent;
    }
    heap[at] = look;
  }
  pop() {
    const heap = this.heap, first = heap[0], last = heap.pop();
    if (!heap.length) return first;
    let at = 0;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= heap.length) break;
      if (child + 1 < heap.length && Looks.before(heap[child + 1], heap[child])) child++;
      if (!Looks.before(heap[child], last)) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = last;
    return first;
  }
}

function greedy({ devices, microbatches, at, numbering, placement, costs, limit }) {
  const stages = placement.length, local = stagesOf(placement, devices), kinds = [F, I, W];
  const memory = local.map((held) => limit || held.reduce((sum, stage) => sum + stages - stage, 0));
  const next = KINDS.split("").map(() => new Array(stages).fill(0));
  const ended = new Float64Array(numbering.size).fill(Infinity);
  const free = new Float64Array(devices), orders = local.map(() => []), looks = new Looks();
  const hop = (from, to) => (placement[from] === placement[to] ? 0 : costs.hop);

  function readyAt(kind, stage, m) {
    if (kind === W) return ended[at(I, stage, m)];
    if (kind === F) return stage ? ended[at(F, stage - 1, m)] + hop(stage - 1, stage) : 0;
    const own = ended[at(F, stage, m)];
    return stage + 1 < stages ? Math.max(own, ended[at(I, stage + 1, m)] + hop(stage + 1, stage)) : own;
  }

  function best(device, now) {
    const kept = local[device].map((stage) => next[F][stage] - next[W][stage]);
    const spare = memory[device] - kept.reduce((sum, n) => sum + n + (n ? 0 : 1), 0);
    let found = null;
    local[device].forEach((stage, n) => {
      for (const kind of kinds) {
        const m = next[kind][stage];
        if (m >= microbatches || (kind === F && kept[n] && spare <= 0) || readyAt(kind, stage, m) > now) continue;
        if (!found || RANK[kind] < RANK[found.kind] || (RANK[kind] === RANK[found.kind] && stage > found.stage))
          found = { kind, stage, m };
      }
    });
    return found;
  }

  for (let device = 0; device < devices; device++) looks.push(0, device);
  while (looks.size) {
    const { time: now, device } = looks.pop();
    const found = now < free[device] ? null : best(device, now);
    if (!found) continue;
    const { kind, stage, m } = found, code = at(kind, stage, m), end = now + costs.seconds[kind];
    next[kind][stage] = m + 1;
    orders[device].push(code);
    free[device] = ended[code] = end;
    looks.push(end, device);
    const other = kind === F ? stage + 1 : kind === I ? stage - 1 : -1;
    if (other >= 0 && other < stages) looks.push(end + hop(stage, other), placement[other]);
  }
  return orders;
}
