package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/hubble/api/peer"
)

// watcher gets the notifications of nodes.
type watcher struct {
	grpc.ServerStream

	ctx context.Context
	got chan string
}

func (w *watcher) Context() context.Context { return w.ctx }

func (w *watcher) Send(m *peer.ChangeNotification) error {
	w.got <- fmt.Sprint(m.GetType(), " ", m.GetName(), " ", m.GetAddress())
	return nil
}

func machine(name, address string, port int32) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = port
	return n
}

// Who watches the nodes gets all of them, and then what changes.
func TestNotify(t *testing.T) {
	lists := make(chan []corev1.Node)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case items := <-lists:
			if items == nil {
				http.Error(w, "no", http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(&corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Items: items})
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	r, err := New(&rest.Config{Host: s.URL}, "1.2.3", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	r.peers = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := &watcher{ctx: ctx, got: make(chan string, 10)}
	done := make(chan error, 1)
	go func() { done <- r.Notify(&peer.NotifyRequest{}, w) }()
	one, two := machine("a", "192.0.2.1", 10250), machine("b", "2001:db8::1", 10250)
	for _, step := range []struct {
		nodes []corev1.Node
		want  []string
	}{
		{[]corev1.Node{two, one}, []string{"PEER_ADDED a 192.0.2.1:10250", "PEER_ADDED b [2001:db8::1]:10250"}},
		{nil, nil}, // what cannot be read changes nothing
		{[]corev1.Node{one, two}, nil},
		{[]corev1.Node{machine("b", "2001:db8::2", 10250)}, []string{"PEER_DELETED a 192.0.2.1:10250", "PEER_UPDATED b [2001:db8::2]:10250"}},
		{[]corev1.Node{machine("b", "2001:db8::2", 0)}, []string{"PEER_UPDATED b "}},
	} {
		select {
		case lists <- step.nodes:
		case err := <-done:
			t.Fatal(err)
		}
		var got []string
		for range step.want {
			got = append(got, <-w.got)
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("got %q, want %q", got, step.want)
		}
	}
	cancel()
	if err := <-done; err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after the end: %v", err)
	}
	if len(w.got) > 0 {
		t.Errorf("more: %s", <-w.got)
	}
}
