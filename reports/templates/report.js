"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const chosen = new Map();  // figure id -> chosen option of each control
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  function axis(own) {
    const common = {
      gridcolor: color("grid"), zerolinecolor: color("rule"), linecolor: color("rule"), automargin: true,
      tickfont: { size: 11.5 }, title: { font: { size: 12 }, standoff: 8 }, separatethousands: true,
    };
    return { ...common, ...own, title: { ...common.title, ...(own && own.title) } };
  }

  function themed(trace) {
    const hue = color(trace.meta.color);
    if (trace.type === "bar") {
      const out = { ...trace, marker: { color: hue, line: { width: 0 } } };
      for (const key of ["error_x", "error_y"]) if (out[key]) out[key] = { ...out[key], color: color("soft") };
      return out;
    }
    return { ...trace, line: { ...trace.line, color: hue }, marker: { size: 7, color: hue, ...trace.marker } };
  }

  function draw(figure) {
    const view = figure.views[(chosen.get(figure.id) || []).join("|")];
    const node = document.getElementById(figure.id);
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
      margin: { l: 44, r: 12, t: 12, b: 40 }, bargap: 0.28, bargroupgap: 0.08, dragmode: false,
      hoverlabel: { bgcolor: color("ink"), bordercolor: color("ink"), font: { color: color("paper"), size: 12.5 }, namelength: -1 },
      ...view.layout,
    };
    layout.margin = { l: 44, r: 12, t: 12, b: 40, ...(view.layout.margin || {}) };
    layout.xaxis = axis(view.layout.xaxis);
    layout.yaxis = axis(view.layout.yaxis);
    layout.annotations = (view.layout.annotations || []).map((note) => ({ ...note, font: { size: 12, color: color("ink") } }));
    return Plotly.react(node, view.data.map(themed), layout, { responsive: true, displayModeBar: false, scrollZoom: false });
  }

  function addControls(figure) {
    const host = document.querySelector(`[data-controls="${figure.id}"]`);
    chosen.set(figure.id, figure.controls.map((control) => control.options[0]));
    figure.controls.forEach((control, position) => {
      if (control.options.length < 2) return;
      const group = document.createElement("div");
      group.className = "segments";
      group.setAttribute("role", "group");
      group.setAttribute("aria-label", control.label);
      for (const option of control.options) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = option;
        button.setAttribute("aria-pressed", String(option === control.options[0]));
        button.addEventListener("click", () => {
          for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
          chosen.get(figure.id)[position] = option;
          draw(figure);
        });
        group.append(button);
      }
      host.append(group);
    });
  }

  const drawAll = () => Promise.all(figures.map(draw));
  figures.forEach(addControls);
  drawAll().then(() => { root.dataset.drawn = String(figures.length); });
  dark.addEventListener("change", () => { root.dataset.theme = dark.matches ? "dark" : "light"; drawAll(); });
  document.getElementById("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("benchctl-theme", next); } catch { /* storage is off: the choice lasts as long as the page */ }
    root.dataset.theme = next;
    drawAll();
  });
})();
