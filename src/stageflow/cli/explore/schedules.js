// Who does what in which order: the builders of stageflow.schedule, for a chain of stages.
// The page must say what the library says; tests/multi/test_explore_model.py compares the two.
"use strict";

const KINDS = "FBIW", F = 0, B = 1, I = 2, W = 3;

// How the orders are written: an action is one number, so that tables over actions are plain arrays.
class Numbering {
  constructor(stages, microbatches) {
    this.stages = stages;
    this.microbatches = microbatches;
    this.size = KINDS.length * stages * microbatches;
  }
  code(kind, stage, microbatch) { return (kind * this.stages + stage) * this.microbatches + microbatch; }
  kind(code) { return Math.floor(code / (this.stages * this.microbatches)); }
  stage(code) { return Math.floor(code / this.microbatches) % this.stages; }
  microbatch(code) { return code % this.microbatches; }
  name(code) { return `${this.stage(code)}${KINDS[this.kind(code)]}${this.microbatch(code)}`; }
}

const loop = (stages, devices) => Array.from({ length: stages }, (_, stage) => stage % devices);
const fold = (stages, devices) => Array.from({ length: stages }, (_, stage) => {
  const at = stage % (2 * devices);
  return at < devices ? at : 2 * devices - 1 - at;
});

function stagesOf(placement, devices) {
  const local = Array.from({ length: devices }, () => []);
  placement.forEach((device, stage) => local[device].push(stage));
  return local;
}

const count = (n) => Array.from({ length: Math.max(0, n) }, (_, i) => i);

function gpipe({ devices, microbatches, at }) {
  return count(devices).map((d) => [F, B].flatMap((kind) => count(microbatches).map((m) => at(kind, d, m))));
}

function oneFOneB({ devices, microbatches, at }) {
  return count(devices).map((d) => {
    const warmUp = Math.min(devices - 1 - d, microbatches);
    const order = count(warmUp).map((m) => at(F, d, m));
    for (let m = 0; m < microbatches; m++) {
      if (warmUp + m < microbatches) order.push(at(F, d, warmUp + m));
      order.push(at(B, d, m));
    }
    return order;
  });
}

function interleaved({ devices, microbatches, chunks, at }) {
  const groups = Math.max(1, Math.floor(microbatches / devices));
  const each = Math.floor(microbatches / groups), more = microbatches % groups;
  const sizes = count(groups).map((g) => each + (g < more ? 1 : 0));
  const grouped = (kind, stages) => {
    const order = [];
    let first = 0;
    for (const size of sizes) {
      for (const stage of stages) for (let m = first; m < first + size; m++) order.push(at(kind, stage, m));
      first += size;
    }
    return order;
  };
  return count(devices).map((d) => {
    const stages = count(chunks).map((c) => c * devices + d);
    const forwards = grouped(F, stages), backwards = grouped(B, stages.slice().reverse());
    const warmUp = Math.min(forwards.length, 2 * (devices - 1 - d) + (chunks - 1) * sizes[0]);
    const order = forwards.slice(0, warmUp);
    for (let n = warmUp; n < forwards.length; n++) order.push(forwards[n], backwards[n - warmUp]);
    return order.concat(backwards.slice(forwards.length - warmUp));
  });
}

// zb_h1 and zb_h2: forwards to warm up, then F and I in turn; a W after each I that leaves too many put off.
function zeroBubble({ devices, microbatches, at }, kept) {
  return count(devices).map((d) => {
    const behind = devices - 1 - d;
    const warmUp = Math.max(0, Math.min(2 * behind, behind + kept - devices));
    const order = count(Math.min(warmUp, microbatches)).map((m) => at(F, d, m));
    let weights = 0;
    for (let m = 0; m < microbatches; m++) {
      const hasForward = warmUp + m < microbatches;
      if (hasForward) order.push(at(F, d, warmUp + m));
      order.push(at(I, d, m));
      if (m + 1 - weights > kept - 1 - warmUp || !hasForward) order.push(at(W, d, weights++));
    }
    while (weights < microbatches) order.push(at(W, d, weights++));
    return order;
  });
}

function zbV({ devices, microbatches, at }) {
  return count(devices).map((d) => {
    const down = d, up = 2 * devices - 1 - d, behind = devices - d;
    const phases = [
      [2 * behind - 1, [[F, down]]],
      [d, [[F, up], [F, down]]],
      [behind, [[F, up], [I, up], [W, up]]],
      [Math.max(0, microbatches - d - behind), [[F, down], [I, down], [W, down], [F, up], [I, up], [W, up]]],
      [d, [[I, down], [I, up]]],
      [behind, [[I, down], [W, down]]],
      [microbatches, [[W, up], [W, down]]],
    ];
    const order = [], done = new Map();
    for (const [times, block] of phases)
      for (let n = 0; n < times; n++)
        for (const [kind, stage] of block) {
          const next = done.get(at(kind, stage, 0)) || 0;
          if (next >= microbatches) continue;
          order.push(at(kind, stage, next));
          done.set(at(kind, stage, 0), next + 1);
        }
    return order;
  });
}

// What the page knows of each schedule. chunks: fewest and most stages per device.
const SCHEDULES = {
  gpipe: {
    build: gpipe, chunks: [1, 1], split: false, place: loop,
    says: "All forwards, then all backwards. Every device keeps the activations of the whole batch.",
    source: "Huang et al. 2019, GPipe",
  },
  "1f1b": {
    build: oneFOneB, chunks: [1, 1], split: false, place: loop,
    says: "A backward as soon as there is one, then a forward. The same bubble as GPipe with far less memory.",
    source: "Narayanan et al. 2021, PipeDream-Flush",
  },
  interleaved_1f1b: {
    build: interleaved, chunks: [2, 4], split: false, place: loop,
    says: "Several smaller stages per device, round and round: the ramps get shorter, the messages more.",
    source: "Narayanan et al. 2021, Megatron-LM",
  },
  zb_h1: {
    build: (given) => zeroBubble(given, given.devices), chunks: [1, 1], split: true, place: loop,
    says: "The backward is split. Gradients of weights (W) wait for a gap, in the memory of 1F1B.",
    source: "Qi et al. 2024, Zero Bubble",
  },
  zb_h2: {
    build: (given) => zeroBubble(given, 2 * given.devices - 1), chunks: [1, 1], split: true, place: loop,
    says: "As zb_h1 with about twice the memory: more forwards up front leave no gap between steps.",
    source: "Qi et al. 2024, Zero Bubble",
  },
  zb_v: {
    build: zbV, chunks: [2, 2], split: true, place: fold,
    says: "Two stages per device in a V, so backwards start where forwards do: little bubble in little memory.",
    source: "Qi et al. 2024, Controllable Memory",
  },
  greedy: {
    build: greedy, chunks: [1, 4], split: true, place: fold,
    says: "No pattern: a free device takes the best of what can start, for these times and this memory limit.",
    source: "List scheduling",
  },
};

// A schedule for these settings. costs: of one stage, see simulate.js. limit: activations of a stage per device, or 0.
function buildSchedule(name, { devices, microbatches, chunks, costs, limit }) {
  const { build, split, place } = SCHEDULES[name];
  const stages = devices * chunks;
  const numbering = new Numbering(stages, microbatches);
  const placement = place(stages, devices);
  const at = (kind, stage, microbatch) => numbering.code(kind, stage, microbatch);
  const orders = build({ devices, microbatches, chunks, at, numbering, placement, costs, limit });
  return { name, devices, stages, microbatches, chunks, split, placement, numbering, orders };
}
