// When everything happens, as in stageflow.schedule.simulate, and the least time that any order could take.

const CAUSES = ["warm-up", "waiting", "transfer", "drain"];

// Times of one stage: each device's times for one micro-batch, cut into as many stages as it has.
// hop: latency of a link; transfer: how long a value occupies it.
function stageCosts({ f, i, w, hop, transfer }, chunks) {
  const seconds = [f / chunks, i / chunks + w / chunks, i / chunks, w / chunks];
  return { seconds, hop, transfer };
}

// What an action waits for: its inputs, its own forward, the gradients of its outputs.
function needsOf(schedule, code) {
  const { numbering, stages, split } = schedule;
  const kind = numbering.kind(code), stage = numbering.stage(code), m = numbering.microbatch(code);
  if (kind === F) return stage ? [numbering.code(F, stage - 1, m)] : [];
  if (kind === W) return [numbering.code(I, stage, m)];
  const own = numbering.code(F, stage, m);
  return stage + 1 < stages ? [own, numbering.code(split ? I : B, stage + 1, m)] : [own];
}

// The stage on another device that an action's result goes to, or -1.
function fedBy(schedule, kind, stage) {
  const target = kind === F ? stage + 1 : kind === W ? -1 : stage - 1;
  const there = target >= 0 && target < schedule.stages;
  return there && schedule.placement[target] !== schedule.placement[stage] ? target : -1;
}

function simulate(schedule, costs) {
  const { numbering, orders, placement, devices } = schedule;
  const start = new Float64Array(numbering.size), end = new Float64Array(numbering.size).fill(-1);
  const arrival = new Float64Array(numbering.size), linkFree = new Map();
  const free = new Float64Array(devices), heads = new Array(devices).fill(0);
  const gaps = orders.map(() => []), waiting = new Map(), ready = count(devices);
  while (ready.length) {
    const device = ready.shift(), order = orders[device];
    for (; heads[device] < order.length; heads[device]++) {
      const code = order[heads[device]], needs = needsOf(schedule, code);
      const missing = needs.find((need) => end[need] < 0);
      if (missing !== undefined) {
        waiting.set(missing, [...(waiting.get(missing) || []), device]);
        break;
      }
      let begin = free[device], made = begin;
      for (const need of needs) {
        const local = placement[numbering.stage(need)] === device;
        made = Math.max(made, end[need]);
        begin = Math.max(begin, local ? end[need] : arrival[need]);
      }
      if (begin > free[device]) noteGap(gaps[device], free[device], made, begin, heads[device] === 0);
      const kind = numbering.kind(code), stage = numbering.stage(code);
      start[code] = begin;
      free[device] = end[code] = begin + costs.seconds[kind];
      const target = fedBy(schedule, kind, stage);
      if (target >= 0) {
        const link = device * devices + placement[target];
        const leaves = Math.max(end[code], linkFree.get(link) || 0) + costs.transfer;
        linkFree.set(link, leaves);
        arrival[code] = leaves + costs.hop;
      }
      if (waiting.has(code)) ready.push(...waiting.get(code));
      waiting.delete(code);
    }
  }
  const makespan = Math.max(...free);
  free.forEach((last, device) => { if (makespan > last) gaps[device].push([last, makespan, 3]); });
  const idle = gaps.map((list) => CAUSES.map((_, cause) =>
    list.reduce((sum, [from, to, why]) => sum + (why === cause ? to - from : 0), 0)));
  const busy = orders.map((order) => order.reduce((sum, code) => sum + end[code] - start[code], 0));
  const bubble = makespan ? 1 - busy.reduce((a, b) => a + b, 0) / (makespan * devices) : 0;
  const memory = orders.map((order) => keptOver(order, numbering, start, end));
  return {
    start, end, arrival, makespan, busy, bubble, idle, memory, gaps,
    peaks: memory.map((steps) => Math.max(...steps.map(([, level]) => level))),
  };
}

// Note idle time as [from, to, cause]: before the first action, until all is made, while some of it is on a link.
function noteGap(gaps, from, made, to, first) {
  if (first) gaps.push([from, to, 0]);
  else {
    if (made > from) gaps.push([from, made, 1]);
    if (to > made) gaps.push([made, to, 2]);
  }
}

// Activations of a stage that a device keeps, as [time, level from then on]: one from each F until its B or W ends.
function keptOver(order, numbering, start, end) {
  const steps = [[0, 0]];
  let level = 0;
  for (const code of order) {
    const kind = numbering.kind(code);
    if (kind === F) steps.push([start[code], ++level]);
    else if (kind !== I) steps.push([end[code], --level]);
  }
  return steps;
}

// No order on this placement takes less. Each device, and each link, has its work; it can't start before the first
// micro-batch has come that far, and after its end the last one still has to go on to the end.
function lowerBound(schedule, costs) {
  const { stages, placement, devices, microbatches: m, split } = schedule;
  const [f, whole, i, w] = costs.seconds, back = split ? i : whole;
  const way = (a, b) => (placement[a] === placement[b] ? 0 : costs.transfer + costs.hop);
  const head = [0], tail = [split ? w : 0], grad = [], rest = [];
  for (let s = 1; s < stages; s++) {
    head[s] = head[s - 1] + f + way(s - 1, s);
    tail[s] = way(s, s - 1) + back + tail[s - 1];
  }
  for (let s = stages - 1; s >= 0; s--) {
    const last = s + 1 === stages;
    grad[s] = (last ? head[s] + f : grad[s + 1] + way(s + 1, s)) + back;
    rest[s] = f + (last ? back + tail[s] : way(s, s + 1) + rest[s + 1]);
  }
  let bound = rest[0];
  for (const local of stagesOf(placement, devices)) {
    const work = m * local.length, first = Math.min(...local.map((s) => head[s]));
    bound = Math.max(bound, first + work * (f + back) + Math.min(...local.map((s) => tail[s])));
    if (split) bound = Math.max(bound, first + work * (f + i + w));
  }
  const links = new Map();
  const carry = (from, to, made, after) => {
    if (placement[from] === placement[to]) return;
    const key = placement[from] * devices + placement[to], link = links.get(key) || [0, Infinity, Infinity];
    links.set(key, [link[0] + m, Math.min(link[1], made), Math.min(link[2], after)]);
  };
  for (let s = 0; s + 1 < stages; s++) {
    carry(s, s + 1, head[s] + f, rest[s + 1]);
    carry(s + 1, s, grad[s + 1], back + tail[s]);
  }
  for (const [values, made, after] of links.values())
    bound = Math.max(bound, made + values * costs.transfer + costs.hop + after);
  return bound;
}
