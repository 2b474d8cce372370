// The charts: Plotly with the colours of the page.

const charts = [];

async function load(code) {
  if (!charts.length) return;
  const script = document.createElement("script");
  script.nonce = document.querySelector("script[nonce]").nonce;
  script.textContent = code;
  document.head.append(script);
  const touch = matchMedia("(hover: none)").matches;  // its toolbar is always there, so it is small
  for (const [place, block] of charts) {
    if (innerWidth < 640) place.before(legend(block));
    await Plotly.newPlot(place, block.data, themed(block), {
      responsive: true, displaylogo: false, showLink: false,
      showSendToCloud: false, plotlyServerURL: "",  // no button may send a chart to another host
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", ...(touch ? ["toImage", "zoom2d", "pan2d"] : [])],
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(([place, block]) => Plotly.relayout(place, themed(block)));
  });
}

// On a phone, the legend of Plotly takes the place of the chart. This one stands above it.
function legend(block) {
  const made = element("div", "legend");
  const seen = new Set();
  block.data.filter((trace) => trace.name && trace.showlegend !== false).forEach((trace) => {
    if (seen.has(trace.name)) return;
    seen.add(trace.name);
    const swatch = element("i", (trace.fillpattern ?? trace.marker?.pattern)?.shape ? "hatched" : "");
    const colour = trace.fillcolor ?? trace.line?.color ?? trace.marker.color;
    swatch.style.backgroundColor = colour;
    const name = element("span");
    name.append(swatch, new DOMParser().parseFromString(trace.name, "text/html").body.textContent);
    made.append(name);
  });
  return made;
}

function themed(block) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const narrow = innerWidth < 640;
  const layout = {
    hovermode: "closest",
    margin: { l: 56, r: 8, t: 24, b: 40 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...structuredClone(block.layout),
    legend: {
      orientation: "h", x: 0, y: 1 + (block.layout.annotations?.length ? 18 : 2) / (block.height - 80), yanchor: "bottom",
      font: { size: 12 }, ...block.layout.legend,
    },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--front"), size: narrow ? 10 : 12 },
    showlegend: !narrow,
  };
  for (const name of ["xaxis", ...Object.keys(block.layout).filter((key) => key.startsWith("yaxis"))]) {
    layout[name] = { automargin: true, gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), ...layout[name] };
  }
  return layout;
}
