// Package monitoring holds alerts and dashboards for users' Prometheus and Grafana, and tests them.
package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// foreign are the metrics of etcd and of k8s.io/apiserver that alerts and dashboards use. docs/metrics.md has those
// that fairlead defines.
var foreign = []string{"etcd_server_has_leader", "apiserver_request_total", "apiserver_request_duration_seconds"}

// rule is one alert.
type rule struct {
	Alert, Expr string
	Annotations map[string]string
}

func readAlerts(t *testing.T) []rule {
	t.Helper()
	text, err := os.ReadFile("alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct{ Rules []rule }
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	var rules []rule
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	if len(rules) == 0 {
		t.Fatal("alerts.yaml has no rule")
	}
	return rules
}

// promtool runs Prometheus's own checker.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Skipf("%v (Debian: prometheus)", err)
	}
	if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", args, err, out)
	}
}

// Each alert fires on its fault, and is quiet without it.
func TestAlerts(t *testing.T) {
	promtool(t, "check", "rules", "alerts.yaml")
	promtool(t, "test", "rules", "alerts_test.yaml")
	tests, err := os.ReadFile("alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range readAlerts(t) {
		for _, does := range []string{"fires", "stays quiet"} {
			if !strings.Contains(string(tests), fmt.Sprintf("name: %s %s\n", r.Alert, does)) {
				t.Errorf("alerts_test.yaml has no case in which %s %s", r.Alert, does)
			}
		}
	}
}

// docs/alerts.md has one section for each alert, to which the alert leads.
func TestRunbooks(t *testing.T) {
	text, err := os.ReadFile("../../docs/alerts.md")
	if err != nil {
		t.Fatal(err)
	}
	var sections, alerts []string
	for _, m := range regexp.MustCompile(`(?m)^## (\w+)$`).FindAllStringSubmatch(string(text), -1) {
		sections = append(sections, m[1])
	}
	for _, r := range readAlerts(t) {
		alerts = append(alerts, r.Alert)
		if at := r.Annotations["runbook_url"]; !strings.HasSuffix(at, "/docs/alerts.md#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s leads to %q", r.Alert, at)
		}
	}
	if !slices.Equal(sections, alerts) {
		t.Errorf("docs/alerts.md has sections %v; the alerts are %v", sections, alerts)
	}
}

// Alerts and dashboards only use metrics that are served.
func TestMetricsExist(t *testing.T) {
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	known := slices.Clone(foreign)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		known = append(known, m[1])
	}
	expressions := map[string]string{}
	for _, r := range readAlerts(t) {
		expressions[r.Alert] = r.Expr
	}
	for name, expr := range dashboardExpressions(t) {
		expressions[name] = expr
	}
	names := regexp.MustCompile(`\b(?:[a-z0-9]+_){2,}[a-z0-9]+\b`)
	for where, expr := range expressions {
		for _, name := range names.FindAllString(expr, -1) {
			if !slices.Contains(known, name) && !slices.Contains(known, strings.TrimSuffix(name, "_bucket")) {
				t.Errorf("%s uses %s, which nothing serves", where, name)
			}
		}
	}
}

// dashboardExpressions returns the expressions of all panels by dashboard and panel.
func dashboardExpressions(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("dashboards/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	found := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d struct {
			Panels []struct {
				Title   string
				Type    string
				Targets []struct{ Expr, RefID string }
			}
		}
		if err := json.Unmarshal(text, &d); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, p := range d.Panels {
			if p.Type != "row" && len(p.Targets) == 0 {
				t.Errorf("%s: panel %q shows nothing", file, p.Title)
			}
			for _, target := range p.Targets {
				found[fmt.Sprintf("%s, %s %s", file, p.Title, target.RefID)] = target.Expr
			}
		}
	}
	return found
}

// Prometheus parses every expression of the dashboards.
func TestDashboardsParse(t *testing.T) {
	type recording struct{ Record, Expr string }
	type group struct {
		Name  string
		Rules []recording
	}
	g := group{Name: "dashboards"}
	for _, expr := range dashboardExpressions(t) {
		expr = strings.ReplaceAll(expr, "$instance", ".*")
		g.Rules = append(g.Rules, recording{fmt.Sprintf("panel:%d", len(g.Rules)), expr})
	}
	text, err := yaml.Marshal(map[string][]group{"groups": {g}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", file)
}
