package wire

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
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// The key of the speakers is replaced in the Secret while they run, each of which reads it at another time; no message
// is rejected on the way.
func TestKeyIsReplaced(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
	older, newer := bytes.Repeat([]byte{1}, claim.KeyBytes), bytes.Repeat([]byte{2}, claim.KeyBytes)
	secret := func(data map[string][]byte) { // as "kubectl replace --force" does
		_ = client.CoreV1().Secrets(svc.SystemNamespace).Delete(t.Context(), svc.SpeakerKeySecret, metav1.DeleteOptions{})
		if data == nil {
			return
		}
		_, err := client.CoreV1().Secrets(svc.SystemNamespace).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: svc.SpeakerKeySecret}, Immutable: new(true), Data: data,
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	secret(map[string][]byte{claim.KeyEntry: older})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	log := slog.New(slog.DiscardHandler)
	var speakers []*Conn
	for _, name := range []string{"a", "b"} {
		keys, err := FirstKeys(ctx, client, log)
		if err != nil {
			t.Fatal(err)
		}
		s, err := Listen(name, netip.MustParseAddrPort("127.0.0.1:0"), keys, log)
		if err != nil {
			t.Fatal(err)
		}
		running.Go(func() { s.Run(ctx) })
		speakers = append(speakers, s)
	}
	exchange := func(when string) {
		t.Helper()
		for i, s := range speakers {
			to := speakers[1-i]
			at := to.conn.LocalAddr().String()
			testbed.Until(t, "a message "+when, func() error {
				s.Send([]quorum.Envelope{{To: to.self, Address: at, Message: &quorum.Message{Kind: quorum.Notice}}}, nil)
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
		{"the next one is accepted", map[string][]byte{claim.KeyEntry: older, "next": newer}, [][]byte{older, newer}},
		{"the Secret is away", nil, [][]byte{older, newer}},
		{"it is wrong", map[string][]byte{claim.KeyEntry: newer[:3]}, [][]byte{older, newer}},
		{"they have changed places", map[string][]byte{claim.KeyEntry: newer, "next": older, "short": []byte("x")}, [][]byte{newer, older}},
		{"the old one is gone", map[string][]byte{claim.KeyEntry: newer}, [][]byte{newer}},
	} {
		secret(step.data)
		for _, s := range speakers {
			s.refreshKeys(ctx, client)
			if got := *s.keys.Load(); !slices.EqualFunc(got, step.want, bytes.Equal) {
				t.Fatalf("%s: keys %v", step.what, got)
			}
			exchange(step.what)
		}
	}
	stranger, err := Listen("c", netip.MustParseAddrPort("127.0.0.1:0"), [][]byte{older}, log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stranger.conn.Close() }()
	to, notice := speakers[0], &quorum.Message{Kind: quorum.Notice}
	testbed.Until(t, "the old key to be rejected", func() error {
		stranger.Send([]quorum.Envelope{{To: "a", Address: to.conn.LocalAddr().String(), Message: notice}}, nil)
		if to.rejected.Load() == 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
}
