package barrier

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// A report is written again into a Lease that was deleted and made again, and not into one
// that has it.
func TestReportReturns(t *testing.T) {
	for _, own := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx := t.Context()
			wanted := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
				Namespace: Namespace, Name: svc.ProgrammedLease, Annotations: map[string]string{WantedAnnotation: Versions{ProxySlices: 5}.String()},
			}}
			client := fake.NewClientset(wanted)
			// A fake watch has everything of its namespace, whatever it selects.
			client.PrependWatchReactor("leases", func(a clienttesting.Action) (bool, watch.Interface, error) {
				w, err := client.Tracker().Watch(a.GetResource(), a.GetNamespace())
				return true, watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
					l, ok := e.Object.(*coordinationv1.Lease)
					return e, ok && l.Name == svc.ProgrammedLease
				}), err
			})
			r := &Reporter{
				Client: client, NodeName: "here", Progress: NewProgress(ProxySlices), Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
				Node: func() *corev1.Node { return nil }, Own: own,
			}
			leases, name := r.lease()
			create := func() {
				t.Helper()
				if own {
					return // the Reporter does
				}
				l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
				if _, err := leases.Create(ctx, l, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			reports := func() {
				t.Helper()
				time.Sleep(2 * checkPeriod) // of the bubble's clock
				synctest.Wait()
				l, err := leases.Get(ctx, name, metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if text := l.Annotations[ProgrammedAnnotation]; text != "proxy-endpointslices=7" {
					t.Errorf("own %t: the Lease reports %q", own, text)
				}
			}
			create()
			go func() { _ = r.Run(ctx) }()
			r.Progress.Reached(ProxySlices, 7)
			reports()
			client.ClearActions()
			reports()
			for _, a := range client.Actions() {
				if a.GetVerb() == "patch" || a.GetVerb() == "create" {
					t.Errorf("own %t: a report is written again though it is there: %v", own, a)
				}
			}
			if err := leases.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			create()
			reports()
		})
	}
}

// A node that reports before it has programmed anything does so again when it has, though nothing is awaited: no controller
// waits for a node that has not started.
func TestReportsItsStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: svc.ProgrammedLease}})
		r := &Reporter{
			Client: client, NodeName: "here", Progress: NewProgress(ProxySlices), Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			Node: func() *corev1.Node { return nil }, Own: true, Drains: true,
		}
		go func() { _ = r.Run(t.Context()) }()
		for _, want := range []string{"proxy-endpointslices=0", "proxy-endpointslices=7", "proxy-endpointslices=7"} {
			time.Sleep(2 * checkPeriod) // of the bubble's clock
			synctest.Wait()
			l, err := client.CoordinationV1().Leases(Namespace).Get(t.Context(), OwnLease("here"), metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got := l.Annotations[ProgrammedAnnotation]; got != want || l.Annotations[DrainsAnnotation] != "true" || !r.Controlled() {
				t.Errorf("the Lease has %v, want %s", l.Annotations, want)
			}
			next := map[bool]uint64{false: 7, true: 8}[want == "proxy-endpointslices=7"]
			r.Progress.Reached(ProxySlices, next) // 8 is not awaited
		}
	})
}
