"use strict";
// What the schedule player shows, as values: what each is without a word, and what an address may ask for.

(() => {
  const MM = (globalThis.MM ||= {});
  const { check } = MM;
  // A forward and a backward take time; a message may take none, and the halves of a backward half of it.
  const most = 1e6, RULES = { f: { min: 0.001, max: most }, b: { min: 0.001, max: most }, c: { min: 0, max: most }, bi: { min: 0, max: most }, bw: { min: 0, max: most }, cap: { min: 0, max: 1000, whole: true } };
  const numbers = Object.fromEntries(Object.entries(RULES).map(([name, rule]) => [name, check.number(rule)]));

  MM.PlayerState = {
    RULES,
    DEFAULTS: { schedule: "1f1b", p: 4, M: 8, v: 1, G: 0, overlap: 0, f: 1, b: 2, c: 0, bi: 0, bw: 0, pair: "sum", cap: 0, link: "both", balance: "", vs: "", messages: 0, critical: 0 },
    CHECKS: {
      schedule: check.one(() => MM.schedules()), vs: check.one(() => ["", ...MM.schedules()]),
      p: check.number({ min: 1, max: 16, whole: true }), M: check.number({ min: 1, max: 128, whole: true }), v: check.number({ min: 1, max: 4, whole: true }), G: check.number({ min: 0, max: 128, whole: true }),
      ...numbers, t: check.number({ min: 0, max: 1e12 }),
      pair: check.one(() => ["sum", "max"]), link: check.one(() => ["both", "buffered"]), balance: check.words(/^(\d+(\.\d+)?(,\d+(\.\d+)?)*)?$/),
      overlap: check.flag, messages: check.flag, critical: check.flag, predict: check.flag,
      at: check.words(/^(b\|)?\d+[:>][\w.:&#-]+$/), follow: check.words(/^(b\|)?\d{1,3}$/), step: check.number({ min: 0, max: 10000, whole: true }),
    },
  };
})();
