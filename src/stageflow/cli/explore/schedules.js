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

// One device's order: warm up with forwards, then a forward and a backward in turn, then the other backwards. A gradient
// of weights follows each backward that leaves more than so many put off, or that had no forward before.
function alternate(forwards, backwards, warmUp, weights = [], waiting = 0) {
  const order = forwards.slice(0, warmUp);
  let put = 0;
  backwards.forEach((backward, done) => {
    const hasForward = warmUp + done < forwards.length;
    if (hasForward) order.push(forwards[warmUp + done]);
    order.push(backward);
    if (put < weights.length && (done + 1 - put > waiting || !hasForward)) order.push(weights[put++]);
  });
  return order.concat(weights.slice(put));
}

// One stage per device; warmUp: how many forwards for so many devices behind.
function inTurn({ devices, microbatches, at }, warmUp) {
  const all = (kind, d) => count(microbatches).map((m) => at(kind, d, m));
  return count(devices).map((d) => alternate(all(F, d), all(B, d), warmUp(devices - 1 - d)));
}

// All micro-batches of a device's first stage, then of its next; backwards the other way.
function breadthFirst({ devices, microbatches, chunks, at }) {
  return count(devices).map((d) => {
    const through = (kind, stages) => stages.flatMap((stage) => count(microbatches).map((m) => at(kind, stage, m)));
    const stages = count(chunks).map((c) => c * devices + d);
    return [...through(F, stages), ...through(B, stages.slice().reverse())];
  });
}

// Micro-batches in groups, each through all stages of a device before the next. warmUp: forwards per device, given the
// size of a group; kinds: those of the backward.
function grouped({ devices, microbatches, chunks, at }, kinds, warmUp) {
  const groups = Math.max(1, Math.floor(microbatches / devices));
  const each = Math.floor(microbatches / groups), more = microbatches % groups;
  const sizes = count(groups).map((g) => each + (g < more ? 1 : 0));
  const firsts = sizes.map((_, g) => sizes.slice(0, g).reduce((sum, size) => sum + size, 0));
  return count(devices).map((d) => {
    const stages = count(chunks).map((c) => c * devices + d), back = stages.slice().reverse();
    const order = (kind, way) => sizes.flatMap((size, g) =>
      way.flatMap((stage) => count(size).map((m) => at(kind, stage, firsts[g] + m))));
    const [backwards, weights] = kinds.map((kind) => order(kind, back));
    return alternate(order(F, stages), backwards, warmUp(d, sizes[0]), weights, d);
  });
}

// kept: how many activations a device may keep.
function zeroBubble({ devices, microbatches, at }, kept) {
  return count(devices).map((d) => {
    const behind = devices - 1 - d, warmUp = Math.max(0, Math.min(2 * behind, behind + kept - devices));
    const [forwards, inputs, weights] = [F, I, W].map((kind) => count(microbatches).map((m) => at(kind, d, m)));
    return alternate(forwards, inputs, warmUp, weights, kept - 1 - warmUp);
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
      [microbatches, [[W, up]]],
      [microbatches, [[W, down]]],
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

// Every micro-batch takes the same block, six slots after the one before. starts: for a device, the slots of F of its
// first and second stage, and of I of its second and first. Ws take what is left over, the oldest first.
function repeated({ devices, microbatches, at }, starts) {
  return count(devices).map((d) => {
    const up = 2 * devices - 1 - d, parts = [[F, d], [F, up], [I, up], [I, d]], taken = new Map();
    starts(d).forEach((start, n) => count(microbatches).forEach((m) => taken.set(start + 6 * m, [...parts[n], m])));
    const order = [], weights = [];
    for (let slot = 0; slot <= Math.max(...taken.keys()); slot++) {
      const [kind, stage, m] = taken.get(slot) || [];
      if (kind === undefined) order.push(...weights.splice(0, 1));
      else {
        order.push(at(kind, stage, m));
        if (kind === I) weights.push(at(W, stage, m));
      }
    }
    return order.concat(weights);
  });
}

function vHalf(given) {
  const p = given.devices, e = p % 2 ? 0 : 3;
  return repeated(given, (d) => [2 * d, 3 * p - d - 2, 3 * p + e + 2 * d - 1, 6 * p + e - d - 2]);
}

function vMin(given) {
  const p = given.devices, e = p % 3 ? 0 : 2;
  return repeated(given, (d) => [d, 2 * p - 1 - d, 2 * p + e + d, 4 * p + e - d - 1]);
}

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
