"use strict";
// The words of every widget: MM.say("player.of", {time: 3, span: 33}). They stand in docs/strings/LANGUAGE.json,
// one file per language, which the build writes as javascripts/words.js and words_zh.js. A page has loaded that of
// its own language; this file picks and fills in.
//
// {name} is filled in. A string that depends on a number is an object of plural forms, as Intl.PluralRules
// names them ("one", "other", ...), picked by the value called n. A name that is missing is shown as it is,
// which a test looks for.

(() => {
  const MM = (globalThis.MM ||= {});
  const language = document.documentElement.lang || "en";
  const plural = new Intl.PluralRules(language);

  MM.say = function say(name, values = {}) {
    let text = MM.strings?.[name];
    if (text === undefined) return `⟨${name}⟩`;
    if (typeof text !== "string") text = text[plural.select(values.n)] ?? text.other;
    return text.replace(/\{(\w+)\}/g, (whole, key) => (key in values ? String(values[key]) : whole));
  };
})();
