package apiserver_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// readUntil returns the events of w after its lists, as type and version, up to the deletion
// of the object of that name. It gives up when ctx ends.
func readUntil(ctx context.Context, w watch.Interface, last string, list bool) (got []string, err error) {
	for {
		select {
		case e, ok := <-w.ResultChan():
			m, known := e.Object.(*corev1.ConfigMap)
			if !ok || !known {
				return got, fmt.Errorf("it ended with %v after %d events", e, len(got))
			}
			if list {
				list = m.Annotations[metav1.InitialEventsAnnotationKey] != "true"
				continue
			}
			if e.Type == watch.Bookmark {
				continue
			}
			if got = append(got, fmt.Sprint(e.Type, " ", m.Name, " ", m.ResourceVersion)); e.Type == watch.Deleted && m.Name == last {
				return got, nil
			}
		case <-ctx.Done():
			return got, fmt.Errorf("%s was not deleted in time, after %d events: %w", last, len(got), context.Cause(ctx))
		}
	}
}

// Clients that begin to watch while objects change have the same events from then on as a
// watch with a selector, which has all from the beginning and is shared with nobody.
func TestWatchesHaveTheSameEvents(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t)
	ctx := t.Context()
	// The writes take as long as the disk lets them: readers have waitTimeout from the last write on.
	reading, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	maps := func() func(o metav1.ListOptions) (watch.Interface, error) {
		own := rest.CopyConfig(cfg)
		own.Dial = (&net.Dialer{}).DialContext // its own connection
		c := kubernetes.NewForConfigOrDie(own).CoreV1().ConfigMaps("default")
		return func(o metav1.ListOptions) (watch.Interface, error) {
			o.AllowWatchBookmarks = true
			return c.Watch(ctx, o)
		}
	}
	c := kubernetes.NewForConfigOrDie(cfg).CoreV1().ConfigMaps("default")
	list, err := c.List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	alone, err := maps()(metav1.ListOptions{ResourceVersion: list.ResourceVersion, LabelSelector: "app=a"})
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Stop()
	var wg sync.WaitGroup
	results := make(chan []string, 100)
	read := func(begin func(metav1.ListOptions) (watch.Interface, error), o metav1.ListOptions) {
		wg.Go(func() {
			w, err := begin(o)
			if err != nil {
				t.Error(err)
				return
			}
			defer w.Stop()
			got, err := readUntil(reading, w, "last", o.SendInitialEvents != nil)
			if err != nil {
				t.Error(err)
			}
			results <- got
		})
	}
	clients := []func(metav1.ListOptions) (watch.Interface, error){maps(), maps(), maps()}
	for i := range 60 {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("m", i%10), Labels: map[string]string{"app": "a"}}}
		if m, err = c.Create(ctx, m, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		o := metav1.ListOptions{ResourceVersion: m.ResourceVersion}
		if i%2 == 0 {
			o = metav1.ListOptions{SendInitialEvents: new(true), ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}
		}
		read(clients[i%3], o)
		m.Data = map[string]string{"changed": fmt.Sprint(i)}
		if m, err = c.Update(ctx, m, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := c.Delete(ctx, m.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	last := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "last", Labels: map[string]string{"app": "a"}}}
	if _, err := c.Create(ctx, last, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(ctx, "last", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	defer time.AfterFunc(waitTimeout, func() { giveUp(fmt.Errorf("%s after the last write", waitTimeout)) }).Stop()
	want, err := readUntil(reading, alone, "last", false)
	if err != nil || len(want) != 60*3+2 {
		t.Fatalf("%d events: %v", len(want), err)
	}
	wg.Wait()
	close(results)
	for got := range results {
		if len(got) == 0 || len(got) > len(want) || !slices.Equal(got, want[len(want)-len(got):]) {
			t.Errorf("got\n%q\nwant the last of\n%q", got, want)
		}
	}
}
