package proxy

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// A proxy whose Node does not exist logs that at once, and /healthz fails with a message that names the flag.
func TestNodeThatDoesNotExist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "another"}})
		p, err := New(Options{
			Client: client, NodeName: "here", Dataplane: newFakeDataplane(), Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		p.health.updated(time.Now()) // as after the first Apply
		ask := func() (int, healthBody) {
			w := httptest.NewRecorder()
			p.serveHealthz(w, nil)
			var body healthBody
			if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
				t.Fatal(err)
			}
			return w.Code, body
		}
		for range 2 {
			p.setNode(t.Context(), nil)
		}
		if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "level=ERROR") || !strings.Contains(got, "no Node here") {
			t.Errorf("the log has %q", got)
		}
		if code, body := ask(); code != 503 || body.NodeEligible == nil || *body.NodeEligible || !strings.Contains(body.Message, "--node-name") {
			t.Errorf("/healthz answers %d, %+v", code, body)
		}
		p.setNode(t.Context(), &corev1.Node{})
		if _, body := ask(); body.Message != "" {
			t.Errorf("with its Node: %+v", body)
		}
	})
}
