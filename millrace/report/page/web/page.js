"use strict";
// The page draws itself from compressed data. Every text of a run is written as text, never as HTML.

async function unpack(name) {
  const packed = document.getElementById("data-" + name);
  const bytes = Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
  packed.remove();
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).text();
}

function element(tag, classes, text) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}

// Write a sentence. Words in backticks are code; a key of this run leads to its value.
function sentence(target, text, keys) {
  text.split("`").forEach((part, i) => {
    if (i % 2 === 0) { target.append(part); return; }
    const code = element("code", "", part);
    const key = part.split("=")[0];
    if (!(key in keys)) { target.append(code); return; }
    const link = element("a");
    link.href = "#key-" + key;
    link.title = key + " = " + keys[key] + " in this run";
    link.append(code);
    target.append(link);
  });
  return target;
}

function table(block, keys) {
  const made = element("table");
  const head = made.createTHead().insertRow();
  block.head.forEach((name) => head.append(element("th", "", name)));
  const body = made.createTBody();
  block.rows.forEach((row) => {
    const line = body.insertRow();
    row.forEach((value) => {
      const number = typeof value === "number" || /^[-+]?[\d.,]+( %)?$/.test(value ?? "");
      const cell = line.insertCell();
      cell.className = number ? "number" : String(value ?? "").length < 24 ? "short" : "";
      if (typeof value === "number") cell.textContent = value.toLocaleString("en-US");
      else sentence(cell, String(value ?? ""), keys);
    });
  });
  const scroll = element("div", "scroll");
  scroll.append(made);
  return scroll;
}

const DRAW = {
  text: (block, keys) => sentence(element("p", block.kind || ""), block.text, keys),
  box: (block, keys) => {
    const made = element("div", "box " + block.kind);
    if (block.title) made.append(element("b", "", block.title));
    sentence(made, block.text, keys);
    return made;
  },
  facts: (block, keys) => {
    const made = element("dl");
    block.items.forEach(([name, value]) => {
      made.append(element("dt", "", name), sentence(element("dd"), String(value), keys));
    });
    return made;
  },
  table: (block, keys) => {
    const made = element("div");
    if (block.how) made.append(sentence(element("p", "how"), block.how, keys));
    made.append(table(block, keys));
    return made;
  },
  figure: (block, keys) => {
    const made = element("div");
    made.append(sentence(element("p", "how"), block.how, keys));
    const chart = element("div", "chart");
    chart.style.height = block.height + "px";
    made.append(chart);
    if (block.note) made.append(sentence(element("p", "note"), block.note, keys));
    charts.push([chart, block]);
    return made;
  },
  browser: () => element("div", "browser"),
};

function configuration(keys) {
  const made = element("details");
  made.append(element("summary", "", "Configuration"));
  const rows = Object.entries(keys);
  const block = table({ head: ["key", "value"], rows: rows }, {});
  block.querySelectorAll("tbody tr").forEach((row, i) => { row.id = "key-" + rows[i][0]; });
  made.append(block);
  addEventListener("hashchange", () => {
    if (!location.hash.startsWith("#key-")) return;
    made.open = true;
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  });
  return made;
}

async function start() {
  const main = document.querySelector("main");
  if (typeof DecompressionStream === "undefined") {
    main.append(element("p", "", "This browser is too old: it cannot unpack the data of this page."));
    return;
  }
  const page = JSON.parse(await unpack("page"));
  page.sections.forEach((part) => {
    const link = element("a", "", part.title);
    link.href = "#" + part.id;
    document.querySelector("nav").append(link);
    const made = element("section");
    made.id = part.id;
    made.append(element("h2", "", part.title));
    part.blocks.forEach((block) => made.append(DRAW[block.type](block, page.keys)));
    main.append(made);
  });
  if (Object.keys(page.keys).length) main.append(configuration(page.keys));
  const place = document.querySelector(".browser");
  if (place) browse(place, JSON.parse(await unpack("samples")));
  await load(await unpack("plotly"));
  document.body.dataset.ready = "true";
}

addEventListener("DOMContentLoaded", () => start().catch((error) => {
  document.querySelector("main").append(element("p", "box alarm", "The page cannot be drawn: " + error));
  throw error;
}));
