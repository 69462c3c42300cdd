package events

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

var service = &corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: "shop", Name: "web", UID: "1"}

func newTestRecorder() (*Recorder, *fake.Clientset) {
	client := fake.NewClientset()
	return NewRecorder(client, corev1.EventSource{Component: "test", Host: "here"}, slog.New(slog.DiscardHandler)), client
}

func stored(t *testing.T, client *fake.Clientset) []corev1.Event {
	t.Helper()
	list, err := client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func TestEqualEventsAreCountedInOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, client := newTestRecorder()
		stop := r.Start()
		for range 3 {
			r.Event(service, corev1.EventTypeWarning, "Broken", strings.Repeat("é", 1000))
			time.Sleep(time.Second)
		}
		stop()
		got := stored(t, client)
		if len(got) != 1 || got[0].Count != 3 || got[0].InvolvedObject != *service || got[0].Namespace != "shop" ||
			got[0].ReportingController != "test" || got[0].ReportingInstance != "here" || got[0].Type != "Warning" || got[0].Reason != "Broken" {
			t.Errorf("got %+v", got)
		}
		if m := got[0].Message; len(m) > maxMessage || !strings.HasSuffix(m, "é...") {
			t.Errorf("message of %d bytes ends with %q", len(m), m[len(m)-10:])
		}
	})
}

// What another process of the component has recorded is not written again.
func TestOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, client := newTestRecorder()
		for range 3 {
			stop := r.Start()
			r.Once(service, corev1.EventTypeWarning, "Broken", "it is broken")
			r.Once(service, corev1.EventTypeWarning, "Broken", "another part is broken")
			stop()
			r = NewRecorder(client, r.source, r.log) // of the next process
		}
		if got := stored(t, client); len(got) != 2 || got[0].Count != 1 || got[1].Count != 1 {
			t.Errorf("got %+v", got)
		}
	})
}

func TestEventsOnAnObjectAreRateLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, client := newTestRecorder()
		stop := r.Start()
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
		for i := range 100 {
			r.Event(node, corev1.EventTypeNormal, fmt.Sprintf("Reason%d", i), "")
			time.Sleep(time.Millisecond)
		}
		stop()
		got := stored(t, client)
		if len(got) != 25 || got[0].Namespace != metav1.NamespaceDefault || got[0].InvolvedObject.Kind != "Node" {
			t.Errorf("%d events, want 25; the first is %+v", len(got), got[0])
		}
	})
}

func TestUnreachableServerIsRetriedAndARefusalIsNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, client := newTestRecorder()
		var fails error
		tries := 0
		client.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
			tries++
			return fails != nil, nil, fails
		})
		stop := r.Start()
		fails = errors.New("connection refused")
		r.Event(service, corev1.EventTypeNormal, "Away", "")
		synctest.Wait()
		fails = nil
		time.Sleep(retryPeriod + time.Second)
		if got := stored(t, client); len(got) != 1 || tries != 2 {
			t.Errorf("%d events after %d tries, want 1 after 2", len(got), tries)
		}
		fails = apierrors.NewForbidden(corev1.Resource("events"), "", errors.New("no"))
		r.Event(service, corev1.EventTypeNormal, "Forbidden", "")
		time.Sleep(2 * retryPeriod)
		if tries != 3 {
			t.Errorf("%d tries, want 3", tries)
		}
		stop()
	})
}

func TestStopWritesWhatIsQueuedAndIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, client := newTestRecorder()
		for i := range queueSize + 10 { // what does not fit is dropped
			o := service.DeepCopy()
			o.Name = fmt.Sprintf("s%d", i)
			r.Event(o, corev1.EventTypeNormal, "Queued", "")
		}
		r.Start()()
		if n := len(stored(t, client)); n != queueSize {
			t.Errorf("%d events were written, want %d", n, queueSize)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		r, client := newTestRecorder()
		client.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
			time.Sleep(time.Second)
			return true, nil, errors.New("connection refused")
		})
		for i := range 5 {
			r.Event(service, corev1.EventTypeNormal, "Queued", fmt.Sprint(i))
			time.Sleep(time.Millisecond)
		}
		start := time.Now()
		r.Start()()
		if took := time.Since(start); took > drainTimeout+time.Second {
			t.Errorf("stop took %s", took)
		}
	})
}
