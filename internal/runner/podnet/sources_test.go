package podnet

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Where the kernel has no nf_tables, Pods run, and the condition, the log and one Event of the Node say that their sources are not
// checked, until they are. Another error keeps a Pod from being connected.
func TestSourcesWithoutNFTables(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	client := fake.NewClientset()
	recorder := events.NewRecorder(client, corev1.EventSource{Component: "test"}, slog.New(slog.DiscardHandler))
	defer recorder.Start()()
	changed := 0
	s := newSources(Options{NodeName: "n1", Events: recorder, Log: slog.New(slog.NewTextHandler(&log, nil)), Changed: func() { changed++ }})
	if c := s.Condition(); c.Type != PodsSourcesChecked || c.Status != corev1.ConditionTrue {
		t.Errorf("at first: %+v", c)
	}
	lacking := &nftables.UnsupportedError{Table: nftables.Table{Family: nftables.IPv4, Name: "fairlead-sources"},
		What: "tables of family ip (CONFIG_NF_TABLES_IPV4)", Err: errors.New("operation not supported")}
	for range 2 {
		if err := s.outcome(fmt.Errorf("write: %w", lacking)); err != nil {
			t.Errorf("a Pod is not connected: %v", err)
		}
	}
	// Until the next try, Pods are connected without one.
	if err := s.add("flpod1", "shop/web", []netip.Addr{netip.MustParseAddr("10.244.1.2")}); err != nil || s.kernel != nil {
		t.Errorf("a Pod: %v", err)
	}
	c := s.Condition()
	for _, want := range []string{"pods of this node can send with source addresses that are not their own", "CONFIG_NF_TABLES_IPV4"} {
		if c.Status != corev1.ConditionFalse || c.Reason != "SourcesNotChecked" || !strings.Contains(c.Message, want) {
			t.Errorf("the condition lacks %q: %+v", want, c)
		}
		if strings.Count(log.String(), want) != 1 || !strings.Contains(log.String(), "fairlead check") {
			t.Errorf("the log lacks %q, or has it twice:\n%s", want, log.String())
		}
	}
	testbed.Until(t, "the Event", func() error {
		all, err := client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err == nil && (len(all.Items) != 1 || all.Items[0].Type != corev1.EventTypeWarning || all.Items[0].Reason != "SourcesNotChecked" ||
			all.Items[0].InvolvedObject.Name != "n1" || !strings.Contains(all.Items[0].Message, "CONFIG_NF_TABLES_IPV4")) {
			err = fmt.Errorf("got %+v", all.Items)
		}
		return err
	})
	if err := s.outcome(errors.New("no memory")); err == nil || s.Condition().Status != corev1.ConditionFalse {
		t.Errorf("another error: %v, %+v", err, s.Condition())
	}
	if err := s.outcome(nil); err != nil || s.Condition().Status != corev1.ConditionTrue || changed != 2 {
		t.Errorf("when the kernel can: %v, %+v, %d changes", err, s.Condition(), changed)
	}
	if s.retry.Waits(time.Now()) {
		t.Error("a later Pod waits")
	}
}
