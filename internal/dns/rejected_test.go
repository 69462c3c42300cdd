package dns

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The first failure to read a kind is logged at once, also the first request of all; a kind that can be read does not hide
// another one.
func TestFirstFailuresAreLogged(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, "", errors.New("no role"))
	unauthorized := apierrors.NewUnauthorized("a wrong token")
	away := errors.New("connection refused")
	for name, c := range map[string]struct {
		results []any // of a kind, an error or nil
		want    []string
	}{
		"forbidden":    {[]any{"services", forbidden, "services", forbidden}, []string{"level=ERROR", "kind=services", "no role", "remedy="}},
		"unauthorized": {[]any{"pods", unauthorized}, []string{"level=ERROR", "kind=pods", "a wrong token"}},
		"away":         {[]any{"services", away}, []string{"level=WARN", "kind=services", "connection refused"}},
		"another kind": {[]any{"namespaces", nil, "services", forbidden}, []string{"level=ERROR", "kind=services"}},
	} {
		var log bytes.Buffer
		o := clusterOptions()
		o.Logger, o.Listen = slog.New(slog.NewTextHandler(&log, nil)), []string{"127.0.0.1:0"}
		s, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(c.results); i += 2 {
			err, _ := c.results[i+1].(error)
			s.follow.RecordAPI(c.results[i].(string), err)
		}
		got := log.String()
		if n := strings.Count(got, "\n"); n != 1 {
			t.Errorf("%s: %d lines, want one:\n%s", name, n, got)
		}
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: no %q in %q", name, w, got)
			}
		}
		if s.follow.Up() {
			t.Errorf("%s: the metric reports that the API can be read", name)
		}
		log.Reset()
		s.follow.RecordAPI("services", nil)
		if last := c.results[len(c.results)-2]; last == "services" && (!strings.Contains(log.String(), "reachable") || !s.follow.Up()) {
			t.Errorf("%s: the end of the failure is not logged: %q", name, log.String())
		}
	}
}
