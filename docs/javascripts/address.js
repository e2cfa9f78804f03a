"use strict";
// Each widget's own part of the address: `#player.schedule=1f1b&player.p=4&replay.at=2:F3`. The first player of
// a page is `player`, the next `player2`; a replay is `replay`. What an address asks for is checked when it is
// read; what cannot be shown is said, not shown wrongly.
//
// A link of before, `#schedule=1f1b&p=4`, has names alone: the first widget of the page reads them.

(() => {
  const MM = (globalThis.MM ||= {});
  const taken = {};
  let written = null; // what a widget wrote last

  // -- What a value may be: each returns the value, or throws words that say what it may be --

  const shown = (limit) => (Number.isFinite(limit) ? limit.toLocaleString("en", { maximumFractionDigits: 3 }) : limit);
  const refuse = (words) => { throw new Error(words); };

  MM.check = {
    number: ({ min = -Infinity, max = Infinity, whole = false } = {}) => (text) => {
      const value = Number(text);
      const isFine = text.trim() !== "" && Number.isFinite(value) && value >= min && value <= max && (!whole || Number.isInteger(value));
      return isFine ? value : refuse(MM.say(whole ? "address.whole" : "address.number", { min: shown(min), max: shown(max) }));
    },
    one: (values) => (text) => (values().includes(text) ? text : refuse(MM.say("address.one", { values: values().filter(Boolean).join(", ") }))),
    flag: (text) => (["0", "1", ""].includes(text) ? (text === "0" ? 0 : 1) : refuse(MM.say("address.flag"))),
    words: (pattern) => (text) => (pattern.test(text) ? text : refuse(MM.say("address.words"))),
  };

  MM.Address = class Address {
    // `checks`: name -> one of the above. `isFirst`: whether names alone, as in links of before, are its own.
    constructor(kind, checks, isFirst) {
      taken[kind] = (taken[kind] ?? 0) + 1;
      this.name = taken[kind] === 1 ? kind : kind + taken[kind];
      this.checks = checks;
      this.isFirst = isFirst;
    }

    static words() {
      return new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    }

    has(name) {
      const words = Address.words();
      return words.has(`${this.name}.${name}`) || (this.isFirst && words.has(name));
    }

    // {values: {name: value}, faults: [words]}: of what the address has for this widget.
    read() {
      const words = Address.words(), values = {}, faults = [], own = `${this.name}.`;
      for (const key of words.keys()) if (key.startsWith(own) && !(key.slice(own.length) in this.checks)) faults.push(MM.say("address.unknown", { name: key.slice(0, 60) }));
      for (const [name, check] of Object.entries(this.checks)) {
        const text = words.get(`${this.name}.${name}`) ?? (this.isFirst ? words.get(name) : null);
        if (text === null) continue;
        try {
          values[name] = check(text);
        } catch (error) {
          faults.push(MM.say("address.fault", { name, text: text.slice(0, 40), why: error.message }));
        }
      }
      return { values, faults };
    }

    // The address with this widget's values in place of those it has now.
    with(values) {
      const words = Address.words();
      for (const key of [...words.keys()]) if (key.startsWith(`${this.name}.`) || (this.isFirst && key in this.checks)) words.delete(key);
      for (const [name, value] of Object.entries(values)) words.set(`${this.name}.${name}`, value);
      // Colons, commas and brackets of ids are legal in a fragment, and easier to read so.
      return `#${String(words).replaceAll("%3A", ":").replaceAll("%2C", ",").replaceAll("%3E", ">").replaceAll("%7C", "|")}`;
    }

    link(values) {
      return location.href.replace(/#.*$/, "") + this.with(values);
    }

    // Not at every move of a slider: browsers allow only so many changes of the address. Nor over one that a
    // reader has just given, and of which the widgets are still to hear.
    write(values) {
      clearTimeout(this.writing);
      const before = location.hash;
      this.writing = setTimeout(() => {
        if (location.hash !== before && location.hash !== written) return;
        history.replaceState(history.state, "", this.with(values()));
        written = location.hash;
      }, 120);
    }

    // Tells when a reader, or a link, has changed this widget's part.
    listen(changed) {
      addEventListener("hashchange", () => {
        clearTimeout(this.writing);
        const mine = [...Address.words().keys()].some((key) => key.startsWith(`${this.name}.`) || (this.isFirst && key in this.checks));
        if (mine) changed();
      });
    }
  };
})();
