// What an action is, and why it did not start earlier.

const WORDS = ["forward", "backward", "gradient of the inputs", "gradient of the weights"];

function describe({ schedule, result }, code) {
  const { numbering, placement, orders } = schedule, { start, end, arrival } = result;
  const kind = numbering.kind(code), stage = numbering.stage(code), device = placement[stage];
  const order = orders[device], place = order.indexOf(code), free = place ? end[order[place - 1]] : 0;
  const what = `${numbering.name(code)}: ${WORDS[kind]} of stage ${stage}, micro-batch ${numbering.microbatch(code)}, ` +
    `on device ${device}, from ${short(start[code])} to ${short(end[code])}.`;
  if (start[code] <= free + 1e-9) return `${what} It began as soon as the device was free.`;
  const last = needsOf(schedule, code).find((need) => {
    const local = placement[numbering.stage(need)] === device;
    return Math.abs((local ? end[need] : arrival[need]) - start[code]) < 1e-9;
  });
  const from = placement[numbering.stage(last)], onLink = start[code] - Math.max(free, end[last]);
  const link = onLink > 1e-9 ? `, ${short(onLink)} of it while the value was on the link` : "";
  return `${what} The device waited ${short(start[code] - free)} for ${numbering.name(last)} from device ${from}${link}.`;
}

const short = (number) => `${+number.toPrecision(4)}`;
