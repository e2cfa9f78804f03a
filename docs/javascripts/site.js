"use strict";
// Small things on every page: the name of the search dialog, names that may break, what scrolls by keys.

// The theme gives its search dialog no name to read out.
document.querySelector('.md-search[role="dialog"]')?.setAttribute("aria-label", MM.say("search.name"));

// Long names may break after a dot or an underscore.
for (const code of document.querySelectorAll(":is(h1, h2, h3, td) code, h1, h2, h3"))
  for (const text of [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && /\w[._]\w/.test(node.data)))
    text.replaceWith(...text.data.split(/(?<=\w[._])(?=\w)/).flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part])));

// What scrolls sideways, as wide tables and long lines do on a phone, can be scrolled by keys.
const scrollByKeys = () => {
  for (const element of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .mm-scroll")) {
    if (element.scrollWidth > element.clientWidth + 1) element.tabIndex = 0;
    else if (!element.matches(".mm-scroll")) element.removeAttribute("tabindex");
  }
};
addEventListener("load", scrollByKeys);
addEventListener("resize", scrollByKeys);

// What is copied from a terminal's block is its commands: without the prompt, and without what they print. The
// theme's button takes `data-copy`, where there is one.
for (const block of document.querySelectorAll(".highlight:has(.gp)")) {
  let isGoingOn = false;
  const lines = block.querySelector("code").textContent.split("\n").filter((line) => {
    const isCommand = line.startsWith("$ ") || isGoingOn;
    isGoingOn = isCommand && line.endsWith("\\");
    return isCommand;
  });
  block.dataset.copy = lines.map((line) => line.replace(/^\$ /, "")).join("\n");
}
