package annotation

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/svc"
)

func TestWarnings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind, key, value, want string
	}{
		{"Pod", "fairlead.dev/weight", "5", ""},
		{"Pod", "fairlead.dev/weight", "500", `[fairlead.dev/weight]: "500": want a number from 0 to 256; it counts as 1`},
		{"Pod", "fairlead.dev/wieght", "5", "[fairlead.dev/wieght]: unknown annotation; did you mean fairlead.dev/weight?"},
		{"Pod", "fairlead.dev/colour", "5", "unknown annotation"},
		{"Pod", "fairlead.dev/programs", "x", `"x": `},
		{"Pod", "example.com/wieght", "5", ""},
		{"Pod", "fairlead.dev/dns-server", "true", "it is a label, and has no effect as an annotation"},
		{"Pod", "fairlead.dev/lb-pool", "a", "it has no effect on kind Pod; it is for kind IPAddress or Service"},
		{"Pod", "fairlead.dev/lb-internal", "true", "it is for kind Service"},
		{"Deployment", "fairlead.dev/weight", "5", "write it to spec.template.metadata.annotations"},
		{"EndpointSlice", "fairlead.dev/chekc", "tcp://:80", "did you mean fairlead.dev/check?"},
		{"EndpointSlice", "fairlead.dev/check", "tcp://:80", ""},
		{"Service", "fairlead.dev/ipvs-scheduler", "wrr", ""},
		{"Service", "fairlead.dev/ipvs-scheduler", "rrr", `"rrr": it has no effect; want one of rr, wrr`},
		{"Service", "fairlead.dev/ipvs-schedular", "wrr", "did you mean fairlead.dev/ipvs-scheduler?"},
		{"Service", "fairlead.dev/report-programmed", "yes", "want one of true, false"},
		{"Service", "fairlead.dev/lb-pol", "a", ""}, // package service names it
		{"Namespace", "fairlead.dev/default-quota", "no", "want one of none"},
		{"Node", "fairlead.dev/node-adresses", "192.0.2.1", "did you mean fairlead.dev/node-addresses?"},
		{"Gateway", "fairlead.dev/lb-internal", "true", "write it to spec.infrastructure.annotations"},
		{"Ingress", "fairlead.dev/maintenance", "<h1>Soon</h1>", ""},
		{"HTTPRoute", "fairlead.dev/maintenance", strings.Repeat("x", 64<<10+1), "the page has 65537 bytes, and may have 65536"},
		{"HTTPRoute", "fairlead.dev/maintenance", "off", ""},
		{"GRPCRoute", "fairlead.dev/maintenance", "0", `[fairlead.dev/maintenance]: "0": it counts as false, and requests are served`},
		{"Ingress", "fairlead.dev/maintenance", "yes", "counts as true, and all requests are answered with 503"},
		{"HTTPRoute", "fairlead.dev/maintenance", "flase", `the page "flase"; write true or a page`},
		{"Service", "fairlead.dev/maintenance", "true", "it is for kind HTTPRoute or GRPCRoute or Ingress"},
		{"ConfigMap", "fairlead.dev/weight", "1", "it has no effect on kind ConfigMap"},
	} {
		got := Warnings(c.kind, field.NewPath("metadata", "annotations"), map[string]string{c.key: c.value}, nil)
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("%s %s=%s: %q, want %q", c.kind, c.key, c.value, got, c.want)
		}
		if again := Warnings(c.kind, nil, map[string]string{c.key: c.value}, map[string]string{c.key: c.value}); len(again) > 0 {
			t.Errorf("%s %s: %q of what the object had before", c.kind, c.key, again)
		}
	}
}

// The annotation of a canary has no effect. Its writer is told, also if the Ingress becomes one later.
func TestMaintenanceOfCanary(t *testing.T) {
	t.Parallel()
	const canary = "nginx.ingress.kubernetes.io/canary"
	with := func(value, flag string) map[string]string {
		return map[string]string{svc.MaintenanceAnnotation: value, canary: flag}
	}
	for _, c := range []struct {
		name        string
		now, before map[string]string
		want        string
	}{
		{"new", with("true", "true"), nil, "[fairlead.dev/maintenance]: it has no effect on a canary"},
		{"none", with("false", "true"), nil, ""},
		{"no canary", with("true", "false"), nil, ""},
		{"as it was", with("true", "true"), with("true", "true"), ""},
		{"later", with("true", "true"), with("true", "false"), "write it to the Ingress that has the same host and path"},
	} {
		got := Warnings("Ingress", field.NewPath("metadata", "annotations"), c.now, c.before)
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestLabelWarnings(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]string{
		"fairlead.dev/dns-server":  "",
		"fairlead.dev/dns-servers": "[fairlead.dev/dns-servers]: unknown label; did you mean fairlead.dev/dns-server?",
		"fairlead.dev/weight":      "[fairlead.dev/weight]: it is an annotation, and has no effect as a label",
		"fairlead.dev/lb-internal": "it is an annotation, and has no effect as a label",
		"fairlead.dev/team":        "",
		"fairlead.dev/run":         "",
		"example.com/dns-servers":  "",
	} {
		now := map[string]string{key: "true"}
		got := LabelWarnings(field.NewPath("metadata", "labels"), now, nil)
		if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || !strings.Contains(got[0], want)) {
			t.Errorf("%s: %q, want %q", key, got, want)
		}
		if again := LabelWarnings(nil, now, now); len(again) > 0 {
			t.Errorf("%s: %q of what the object had before", key, again)
		}
	}
}

// A hostile object gets few and short warnings.
func TestWarningsAreBounded(t *testing.T) {
	t.Parallel()
	all := map[string]string{}
	for i := range 5000 {
		all[fmt.Sprintf("fairlead.dev/%s%d", strings.Repeat("é", 40), i)] = strings.Repeat("x", 100)
	}
	all["fairlead.dev/weight"] = strings.Repeat("x", 100_000)
	got := Warnings("Pod", field.NewPath("metadata", "annotations"), all, nil)
	if len(got) != maxWarnings+1 {
		t.Errorf("%d warnings, want %d", len(got), maxWarnings+1)
	}
	if all := strings.Join(got, ""); len(all) > 4096 { // as much as kube-apiserver sends
		t.Errorf("%d bytes of warnings", len(all))
	}
}

// declared matches a constant with the name of an annotation.
var declared = regexp.MustCompile(`(?m)^\s*(?:const )?\w*Annotation\s*=\s*(?:(?:svc\.D|d)omain \+ "/([^"]+)"|"fairlead\.dev/([^"]+)")`)

// Every annotation that the sources name is in the table, so that no reader's own is called unknown.
func TestEveryAnnotationIsKnown(t *testing.T) {
	t.Parallel()
	seen, root := 0, filepath.Join("..", "..", "..", "internal")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declared.FindAllStringSubmatch(string(text), -1) {
			key := svc.Domain + "/" + m[1] + m[2]
			if seen++; readers[key].kinds == nil && !dialect.IsOwn(key) {
				t.Errorf("%s: annotation %s has no reader in the table", path, key)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < len(readers)-2 {
		t.Errorf("%d annotations found, the table has %d", seen, len(readers))
	}
	for key, r := range readers {
		if len(r.kinds) == 0 {
			t.Errorf("annotation %s has no kind", key)
		}
	}
}

// An Ingress with a front for itself gives it annotations of load balancers; one at the shared address cannot.
func TestFrontOfAnIngress(t *testing.T) {
	at, keys := field.NewPath("metadata", "annotations"), map[string]string{"fairlead.dev/lb-pool": "inside"}
	if out := Warnings("Ingress", at, keys, nil); len(out) != 1 || !strings.Contains(out[0], "no effect on kind Ingress") {
		t.Errorf("at the shared address: %q", out)
	}
	keys[fronts.Annotation] = fronts.Own
	if out := Warnings("Ingress", at, keys, nil); len(out) != 0 {
		t.Errorf("with a front: %q", out)
	}
	keys["fairlead.dev/lb-compress"], keys["fairlead.dev/lb-protocol"] = "lz77", "http"
	if out := Warnings("Ingress", at, keys, nil); len(out) != 2 || !strings.Contains(out[0], "lz77") ||
		!strings.Contains(out[1], "the Ingress has the protocols, certificates and paths of its front") {
		t.Errorf("with what a front does not take: %q", out)
	}
	if out := Warnings("Service", at, map[string]string{fronts.Annotation: fronts.Own}, nil); len(out) != 1 {
		t.Errorf("of a Service: %q", out)
	}
}
