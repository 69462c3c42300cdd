package lb

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// The Events of a Service say once each why its Secret cannot be read, and nothing of the node's user and
// addresses, which the log has.
func TestEventsOfUnreadableSecrets(t *testing.T) {
	r := newRig(t)
	var state atomic.Value
	var failures atomic.Int32
	state.Store("it cannot be read")
	config := rest.CopyConfig(r.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			switch state.Load() {
			case "it cannot be read":
				return nil, fmt.Errorf("read tcp 192.0.2.7:%d->192.0.2.1:6443: i/o timeout", 40000+failures.Add(1))
			case "reading it is forbidden":
				req = req.Clone(req.Context())
				req.Header.Set("Impersonate-User", "no one") // without rights
			}
			return next.RoundTrip(req)
		})
	})
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	p := newProxying(SpeakerOptions{NodeName: "n1", Log: log}, kubernetes.NewForConfigOrDie(config))
	p.events = events.NewRecorder(r.client, corev1.EventSource{Component: "fairlead-lb-speaker"}, log)
	stop := p.events.Start()
	n := svc.Name{Namespace: "default", Name: "web"}
	v := &proxiedService{object: r.service("web"), spec: &dialect.Spec{Certificates: []string{"web-cert"}}, listed: true}
	p.services[n] = v
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	p.followSecrets(ctx, &running)
	var want []string
	for _, why := range []string{"it cannot be read", "reading it is forbidden", "it does not exist"} {
		state.Store(why)
		want = append(want, "1 node n1: cannot use the TLS Secret web-cert: "+why)
		r.eventually(why, func() error {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.build(n, v)
			if !strings.HasSuffix(v.failure, why) || failures.Load() < 3 {
				return fmt.Errorf("%q after %d failures", v.failure, failures.Load())
			}
			return nil
		})
	}
	stop()
	list, err := r.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
	r.must(err)
	var got []string
	for _, e := range list.Items {
		got = append(got, fmt.Sprint(e.Count, " ", e.Message))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("Events %q, want %q", got, want)
	}
	cancel()
	running.Wait()
	for _, part := range []string{"192.0.2.7:40001", "no one"} {
		if strings.Count(text.String(), part) != 1 {
			t.Errorf("the log has %q %d times:\n%s", part, strings.Count(text.String(), part), &text)
		}
	}
}
