package relay

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
)

// cluster returns a Relay of an API server that leads to the given nodes.
func cluster(t *testing.T, nodes map[string]http.Handler) *Relay {
	t.Helper()
	mux := http.NewServeMux()
	list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
	for name, h := range nodes {
		list.Items = append(list.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		proxy := "/api/v1/nodes/" + name + "/proxy"
		mux.Handle(proxy+hubble.Path, http.StripPrefix(proxy, h))
	}
	mux.HandleFunc("/api/v1/nodes", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	r, err := New(&rest.Config{Host: s.URL}, "1.2.3", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// client gets the answers to one question.
type client struct {
	grpc.ServerStream

	ctx context.Context
	got []*observer.GetFlowsResponse
}

func (c *client) Context() context.Context { return c.ctx }

func (c *client) Send(m *observer.GetFlowsResponse) error {
	c.got = append(c.got, m)
	return nil
}

// A node whose answer has ended is not asked again.
func TestFollowEnds(t *testing.T) {
	var asked atomic.Int32
	r := cluster(t, map[string]http.Handler{"node-1": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_, _ = w.Write([]byte{0, 0}) // no message, and a status without an error
	})})
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ctx, end := context.WithTimeout(ctx, time.Minute)
	defer end()
	q := &observer.GetFlowsRequest{Follow: true}
	query, err := hubble.NewQuery(q)
	if err != nil {
		t.Fatal(err)
	}
	s := &session{relay: r, query: query, asked: q, to: &client{ctx: ctx}, pods: newPods(r.client)}
	if s.followNode(ctx, cancel, "node-1"); ctx.Err() != nil || asked.Load() != 1 {
		t.Errorf("asked %d times, %v", asked.Load(), ctx.Err())
	}
}
