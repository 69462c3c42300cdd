package kubeproxy

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/parts"
)

// ask returns the pages of a proxy with some flags, as a function that asks one.
func ask(t *testing.T, g *base.Global, args ...string) func(method, path, body string) (int, string) {
	t.Helper()
	var k Flags
	var p parts.ProxyFlags
	var n base.NetworkFlags
	var node string
	cmd := &cobra.Command{Use: "proxy"}
	p.Add(cmd)
	n.AddNetworks(cmd, "", "")
	cmd.Flags().StringVar(&node, "node-name", "machine", "")
	cmd.Flags().StringVar(&p.DetectLocal, "detect-local-mode", "", "")
	k.Add(cmd)
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	if err := k.Complete(cmd, g, &p); err != nil {
		t.Fatal(err)
	}
	all, err := k.Pages(g, "nft")
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for path, h := range all {
		mux.Handle(path, h)
	}
	return func(method, path, body string) (int, string) {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(method, path, strings.NewReader(body))
		mux.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
}

func TestPages(t *testing.T) {
	g := &base.Global{}
	get := ask(t, g, "--cluster-cidr", "10.244.0.0/16", "--hostname-override", "Node1", "--conntrack-min", "7")
	code, text := get("GET", "/configz", "")
	var configz map[string]map[string]any
	if err := json.Unmarshal([]byte(text), &configz); code != 200 || err != nil {
		t.Fatalf("/configz: %d, %v", code, err)
	}
	c := configz["kubeproxy.config.k8s.io"]
	conntrack, _ := c["conntrack"].(map[string]any)
	if c["mode"] != "nftables" || c["clusterCIDR"] != "10.244.0.0/16" || c["hostnameOverride"] != "node1" || conntrack["min"] != 7.0 {
		t.Errorf("/configz has %s", text)
	}
	if code, text := get("GET", "/flagz", ""); code != 200 || !strings.Contains(text, "conntrack-min") {
		t.Errorf("/flagz: %d, %s", code, text)
	}
	code, text = get("GET", "/statusz", "")
	if code != 200 || !strings.Contains(text, "fairlead-proxy") || !strings.Contains(text, "/configz") {
		t.Errorf("/statusz: %d, %s", code, text)
	}
	if code, _ := get("GET", "/debug/pprof/", ""); code != 404 {
		t.Errorf("/debug/pprof without --profiling: %d", code)
	}
}

// With --profiling the profiles are there, and the level of the log can be set.
func TestProfiling(t *testing.T) {
	var out strings.Builder
	g := &base.Global{Streams: base.Streams{Err: &out}, LogLevel: "info", LogFormat: "text"}
	get := ask(t, g, "--profiling")
	log, err := g.Logger()
	if err != nil {
		t.Fatal(err)
	}
	if code, _ := get("GET", "/debug/pprof/goroutine?debug=1", ""); code != 200 {
		t.Errorf("a profile: %d", code)
	}
	log.Debug("before")
	if code, text := get("PUT", "/debug/flags/v", "4"); code != 200 {
		t.Errorf("PUT 4: %d, %s", code, text)
	}
	log.Debug("after")
	if strings.Contains(out.String(), "before") || !strings.Contains(out.String(), "after") {
		t.Errorf("the log has %q", out.String())
	}
	for body, want := range map[string]int{"many": 400, "-1": 400, strings.Repeat("1", 100): 400} {
		if code, _ := get("PUT", "/debug/flags/v", body); code != want {
			t.Errorf("PUT %s: %d, want %d", body, code, want)
		}
	}
	if code, _ := get("GET", "/debug/flags/v", ""); code != 405 {
		t.Errorf("GET: %d", code)
	}
}
