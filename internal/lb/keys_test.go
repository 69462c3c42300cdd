package lb

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/testbed"
)

// The key of the speakers is replaced in the Secret while they run, each of which reads it at another time; no message
// is rejected on the way.
func TestKeyIsReplaced(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	older, newer := bytes.Repeat([]byte{1}, KeyBytes), bytes.Repeat([]byte{2}, KeyBytes)
	secret := func(data map[string][]byte) { // as "kubectl replace --force" does
		_ = r.client.CoreV1().Secrets(Namespace).Delete(t.Context(), KeyName, metav1.DeleteOptions{})
		if data == nil {
			return
		}
		_, err := r.client.CoreV1().Secrets(Namespace).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: KeyName}, Immutable: new(true), Data: data,
		}, metav1.CreateOptions{})
		r.must(err)
	}
	secret(map[string][]byte{KeyEntry: older})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var speakers []*Speaker
	for _, name := range []string{"a", "b"} {
		s := &Speaker{client: r.client, log: slog.New(slog.DiscardHandler)}
		keys, err := s.firstKeys(ctx)
		r.must(err)
		s.wire, err = listen(name, netip.MustParseAddrPort("127.0.0.1:0"), keys, s.log)
		r.must(err)
		running.Go(func() { s.wire.run(ctx) })
		speakers = append(speakers, s)
	}
	exchange := func(when string) {
		t.Helper()
		for i, s := range speakers {
			to := speakers[1-i].wire
			at := to.conn.LocalAddr().String()
			testbed.Until(t, "a message "+when, func() error {
				s.wire.send([]quorum.Envelope{{To: to.self, Address: at, Message: &quorum.Message{Kind: quorum.Notice}}}, nil)
				select {
				case <-to.in:
					return nil
				case <-time.After(time.Second):
					return context.DeadlineExceeded
				}
			})
			if n := to.rejected.Load(); n > 0 {
				t.Fatalf("%s: %d messages are rejected", when, n)
			}
		}
	}
	exchange("at first")
	for _, step := range []struct {
		what string
		data map[string][]byte
		want [][]byte
	}{
		{"the next one is accepted", map[string][]byte{KeyEntry: older, "next": newer}, [][]byte{older, newer}},
		{"the Secret is away", nil, [][]byte{older, newer}},
		{"it is wrong", map[string][]byte{KeyEntry: newer[:3]}, [][]byte{older, newer}},
		{"they have changed places", map[string][]byte{KeyEntry: newer, "next": older, "short": []byte("x")}, [][]byte{newer, older}},
		{"the old one is gone", map[string][]byte{KeyEntry: newer}, [][]byte{newer}},
	} {
		secret(step.data)
		for _, s := range speakers {
			s.refreshKeys(ctx)
			if got := *s.wire.keys.Load(); !slices.EqualFunc(got, step.want, bytes.Equal) {
				t.Fatalf("%s: keys %v", step.what, got)
			}
			exchange(step.what)
		}
	}
	stranger := &Speaker{}
	var err error
	stranger.wire, err = listen("c", netip.MustParseAddrPort("127.0.0.1:0"), [][]byte{older}, slog.New(slog.DiscardHandler))
	r.must(err)
	defer func() { _ = stranger.wire.conn.Close() }()
	to, notice := speakers[0].wire, &quorum.Message{Kind: quorum.Notice}
	testbed.Until(t, "the old key to be rejected", func() error {
		stranger.wire.send([]quorum.Envelope{{To: "a", Address: to.conn.LocalAddr().String(), Message: notice}}, nil)
		if to.rejected.Load() == 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
}
