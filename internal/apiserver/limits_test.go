package apiserver_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// What is too large, too many, too long or too deep is refused with a Status
// that says so, and the server goes on.
func TestLimits(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t)
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	const (
		services, configs = "/api/v1/namespaces/default/services", "/api/v1/namespaces/default/configmaps"
		crds              = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
		js, yml, proto    = "application/json", "application/yaml", runtime.ContentTypeProtobuf
	)
	deep := func(before, open, shut, after string, n int) string {
		return before + strings.Repeat(open, n) + "{}" + strings.Repeat(shut, n) + after
	}
	service := func(meta, ports string) string {
		return `{"apiVersion":"v1","kind":"Service","metadata":` + meta + `,"spec":{"ports":[` + ports + `]}}`
	}
	port := func(i int) string { return fmt.Sprintf(`{"name":"p","port":%d}`, 1+i%5) }
	var many []string
	for i := range 10_000 {
		many = append(many, port(i))
	}
	const definition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"as.deep.example.com"},
		"spec":{"group":"deep.example.com","scope":"Cluster","names":{"plural":"as","kind":"A"},
		"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":`
	for _, c := range []struct {
		name, path, media, body string
		codes                   []int
		want                    string
	}{
		{"3 MB", configs, js, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"},"data":{"a":"` + strings.Repeat("x", 3<<20) +
			`"}}`, []int{413}, "limit is 3145728"},
		{"3 MB of YAML", configs, yml, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata: {a: " + strings.Repeat("x", 3<<20) + "}",
			[]int{413}, "limit is 3145728"},
		{"2 MB of data", configs, js, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"},"data":{"a":"` + strings.Repeat("x",
			2<<20) + `"}}`, []int{422}, "Too long"},
		{"2 MB of annotations", services, js, service(`{"name":"x","annotations":{"a":"`+strings.Repeat("x", 2<<20)+`"}}`, port(0)),
			[]int{422}, "metadata.annotations: Too long"},
		{"10,000 ports", services, js, service(`{"name":"x"}`, strings.Join(many, ",")), []int{422}, "spec.ports[1].name: Duplicate value"},
		{"a name of 300", services, js, service(`{"name":"`+strings.Repeat("x", 300)+`"}`, port(0)), []int{422}, "metadata.name"},
		{"a generated name of 300", services, js, service(`{"generateName":"`+strings.Repeat("X", 300)+`"}`, port(0)), []int{422},
			"metadata.generateName"},
		{"deep JSON", configs, js, deep(`{"apiVersion":"v1","kind":"ConfigMap","data":`, `{"a":`, `}`, `}`, 200_000), []int{400}, ""},
		{"deep JSON lists", configs, js, deep(`{"apiVersion":"v1","kind":"ConfigMap","data":`, `[`, `]`, `}`, 1_000_000), []int{400}, ""},
		{"JSON that does not end", configs, js, `{"apiVersion":"v1","kind":"ConfigMap","data":` + strings.Repeat("[", 2_000_000), []int{400}, ""},
		{"deep YAML", configs, yml, deep("apiVersion: v1\nkind: ConfigMap\ndata: ", `{a: `, `}`, "\n", 100_000), []int{400}, ""},
		{"deep YAML lists", configs, yml, deep("apiVersion: v1\nkind: ConfigMap\ndata: ", `[`, `]`, "\n", 500_000), []int{400}, ""},
		{"YAML aliases that multiply", configs, yml, aliases(9), []int{400}, ""},
		{"a deep schema", crds, js, deep(definition, `{"not":`, `}`, `}}]}}`, 200_000), []int{400}, ""},
		{"a schema of 3,000 levels", crds, js, deep(definition, `{"type":"object","properties":{"a":`, `}}`, `}}]}}`, 3_000),
			[]int{400, 413, 422}, ""},
		{"a deep schema in protobuf", crds, proto, string(deepDefinition(450_000)), []int{400, 413, 422}, ""},
		{"a schema of 9,000 levels in protobuf", crds, proto, string(deepDefinition(9_000)), []int{400, 413, 422}, ""},
		{"protobuf cut short", services, proto, "k8s\x00\x0a\xff\xff\xff\xff\x0f", []int{400}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*waitTimeout)
			defer cancel()
			begin := time.Now()
			status, err := post(ctx, client, cfg.Host+c.path, c.media, c.body)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d after %s: %.120s", status.Code, time.Since(begin), status.Message)
			if !slices.Contains(c.codes, int(status.Code)) || !strings.Contains(status.Message, c.want) {
				t.Errorf("got %d %.500s, want one of %v with %q", status.Code, status.Message, c.codes, c.want)
			}
			if len(status.Message) > 100_000 {
				t.Errorf("the message has %d bytes", len(status.Message))
			}
		})
	}
	if status, err := post(t.Context(), client, cfg.Host+services, js, service(`{"name":"fine"}`, port(0))); err != nil || status.Code >= 400 {
		t.Errorf("afterwards: %+v, %v", status, err)
	}
}

func post(ctx context.Context, client *http.Client, url, media, body string) (metav1.Status, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return metav1.Status{}, err
	}
	r.Header.Set("Content-Type", media)
	r.Header.Set("Accept", "application/json")
	resp, err := client.Do(r)
	if err != nil {
		return metav1.Status{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return metav1.Status{}, err
	}
	if resp.StatusCode < 400 {
		return metav1.Status{Code: int32(resp.StatusCode)}, nil
	}
	var s metav1.Status
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("%d: not JSON: %.200s", resp.StatusCode, text)
	}
	if s.Code != int32(resp.StatusCode) {
		return s, fmt.Errorf("%d, and the Status says %d", resp.StatusCode, s.Code)
	}
	return s, nil
}

// aliases is a document that would have 10^n strings.
func aliases(n int) string {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: ConfigMap\na0: &a0 [" + strings.Repeat("x,", 10) + "]\n")
	for i := 1; i <= n; i++ {
		fmt.Fprintf(&b, "a%d: &a%d [%s]\n", i, i, strings.Repeat(fmt.Sprintf("*a%d,", i-1), 10))
	}
	return b.String()
}

// deepDefinition is a CustomResourceDefinition in protobuf whose schema holds
// n schemas, each in the one before: what no decoder of JSON would read.
func deepDefinition(n int) []byte {
	// The lengths are known from the inside out, so the bytes are written
	// backwards.
	var back []byte
	size := 0
	for range n {
		back = appendBackwards(back, binary.AppendUvarint([]byte{0xe2, 0x01}, uint64(size))) // not = 28
		size = len(back)
	}
	slices.Reverse(back)
	field := func(number int, value []byte) []byte {
		return append(binary.AppendUvarint(binary.AppendUvarint(nil, uint64(number<<3|2)), uint64(len(value))), value...)
	}
	text := func(number int, value string) []byte { return field(number, []byte(value)) }
	names := slices.Concat(text(1, "as"), text(4, "A"))
	version := slices.Concat(text(1, "v1"), []byte{2 << 3, 1, 3 << 3, 1}, field(4, field(1, back)))
	spec := slices.Concat(text(1, "deep.example.com"), field(3, names), text(4, "Cluster"), field(7, version))
	definition := slices.Concat(field(1, text(1, "as.deep.example.com")), field(2, spec))
	kind := slices.Concat(text(1, "apiextensions.k8s.io/v1"), text(2, "CustomResourceDefinition"))
	return slices.Concat([]byte("k8s\x00"), field(1, kind), field(2, definition))
}

func appendBackwards(to, what []byte) []byte {
	what = bytes.Clone(what)
	slices.Reverse(what)
	return append(to, what...)
}
