package dialect

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// Each annotation of our own has a default in the document. One that is a word it may have changes nothing.
func TestDefaultsAreDocumented(t *testing.T) {
	ports, said := []Port{{"web", 80, "TCP", ""}}, 0
	plain := fmt.Sprintf("%+v", Read(Service{Ports: ports}).Spec)
	for _, a := range fairleadDialect().Annotations {
		value := a.without()
		if value == "" {
			t.Errorf("%s has none", a.Key)
		}
		if !slices.Contains(strings.Split(strings.ReplaceAll(a.Values, " or ", ", "), ", "), value) {
			continue
		}
		r := Read(Service{Ports: ports, Annotations: map[string]string{a.Key: value}})
		if r.Invalid() { // nothing without another one
			continue
		}
		said++
		least, _ := TLSPolicyOf("")
		if p, _ := TLSPolicyOf(r.Spec.TLSPolicy); fmt.Sprint(p) == fmt.Sprint(least) {
			r.Spec.TLSPolicy = ""
		}
		if r.Spec.AccessLog.Format == LogELB {
			r.Spec.AccessLog.Format = ""
		}
		if got := fmt.Sprintf("%+v", r.Spec); got != plain {
			t.Errorf("%s: %s is not the default: %s", a.Key, value, got)
		}
	}
	if said < 15 {
		t.Errorf("%d defaults are words", said)
	}
}

func TestDocumentIsGenerated(t *testing.T) {
	have, err := os.ReadFile("../../docs/annotations.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != Document() {
		t.Error("docs/annotations.md is not what the tables say: run go generate ./internal/dialect")
	}
}
