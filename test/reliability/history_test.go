package reliability

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/fairlead/fairlead/internal/testbed"
)

const (
	namespace   = "history"
	writerCount = 6
	objectCount = 12
	// writeTime is how long a client waits for the API. What has no reply then is of an unknown result.
	writeTime = 2 * time.Second
)

// history is what clients of the API have sent and received, through all servers.
type history struct {
	r     *rig
	begin time.Time
	wg    sync.WaitGroup
	stop  context.CancelFunc
	// watches have one for each server.
	watches []*watched

	mu      sync.Mutex
	ops     []porcupine.Operation
	written map[int64]change // that were acknowledged, by resource version
}

// change is one version of an object, as a writer or a watch has it.
type change struct{ key, value string }

func startHistory(r *rig) *history {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	h := &history{r: r, begin: time.Now(), stop: cancel, written: map[int64]change{}}
	made, err := r.servers[0].Client.CoreV1().Namespaces().Create(ctx,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	for i := range writerCount {
		h.wg.Go(func() { h.write(ctx, i, rand.New(rand.NewPCG(*seed, uint64(i)+1))) })
	}
	for _, s := range r.servers {
		w := &watched{server: s, begin: h.begin, from: made.ResourceVersion, seen: map[int64]change{}}
		h.watches = append(h.watches, w)
		h.wg.Go(func() { w.run(ctx) })
	}
	r.t.Cleanup(func() { cancel(); h.wg.Wait() })
	return h
}

// write makes calls until ctx ends, each through a server of its choice.
func (h *history) write(ctx context.Context, id int, rnd *rand.Rand) {
	read := map[string]*corev1.ConfigMap{}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c := call{verb: verb(rnd.IntN(int(remove) + 1)), key: fmt.Sprintf("object-%d", rnd.IntN(objectCount)), value: fmt.Sprintf("%d-%d", id, n)}
		if old := read[c.key]; c.verb == swap && old != nil {
			c.read = old.Data["value"]
		} else if c.verb == swap {
			c.verb = get
		}
		client := h.r.servers[rnd.IntN(len(h.r.servers))].Client.CoreV1().ConfigMaps(namespace)
		begin := time.Since(h.begin)
		got, err := do(ctx, client, c, read[c.key])
		end := time.Since(h.begin)
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		answer, sent := replyOf(err)
		if !sent {
			continue
		}
		if got != nil && err == nil {
			answer.value = got.Data["value"]
			read[c.key] = got
		}
		if answer.result == unknown {
			end = math.MaxInt64
		}
		h.add(porcupine.Operation{ClientId: id, Input: c, Call: int64(begin), Output: answer, Return: int64(end)}, got)
	}
}

func (h *history) add(op porcupine.Operation, got *corev1.ConfigMap) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, r := op.Input.(call), op.Output.(reply)
	if c.verb == get && r.result == unknown {
		return
	}
	h.ops = append(h.ops, op)
	if r.result == done && c.verb != get && c.verb != remove {
		h.written[version(got)] = change{c.key, c.value}
	}
}

func version(c *corev1.ConfigMap) int64 {
	n, err := strconv.ParseInt(c.ResourceVersion, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// do makes a call. read is what swap replaces.
func do(ctx context.Context, client typedcorev1.ConfigMapInterface, c call, read *corev1.ConfigMap) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: c.key}, Data: map[string]string{"value": c.value}}
	switch c.verb {
	case create:
		return client.Create(ctx, object, metav1.CreateOptions{})
	case put:
		return client.Update(ctx, object, metav1.UpdateOptions{})
	case patch:
		return client.Patch(ctx, c.key, types.MergePatchType, fmt.Appendf(nil, `{"data":{"value":%q}}`, c.value), metav1.PatchOptions{})
	case swap:
		object.ResourceVersion = read.ResourceVersion
		return client.Update(ctx, object, metav1.UpdateOptions{})
	case remove:
		return nil, client.Delete(ctx, c.key, metav1.DeleteOptions{})
	}
	return client.Get(ctx, c.key, metav1.GetOptions{})
}

// replyOf returns what an error tells of a call, and whether the call can have been made at all.
func replyOf(err error) (r reply, sent bool) {
	var op *net.OpError
	switch {
	case err == nil:
		return reply{result: done}, true
	case apierrors.IsNotFound(err):
		return reply{result: absent}, true
	case apierrors.IsAlreadyExists(err):
		return reply{result: present}, true
	case apierrors.IsConflict(err):
		return reply{result: conflict}, true
	case apierrors.IsTooManyRequests(err), errors.As(err, &op) && op.Op == "dial":
		return r, false
	}
	return r, true
}

// watched is what one server's watch has sent.
type watched struct {
	server *server
	begin  time.Time // of the history

	mu     sync.Mutex
	from   string // the version from which it goes on
	seen   map[int64]change
	last   int64
	gaps   int // begun again with a list, as the version was too old
	broken []string
	trail  []moment
}

// moment is something that happened to a watch: it began, ended, or received an event.
type moment struct {
	at      time.Duration // since the history began
	what    string
	version string
}

func (s moment) String() string {
	return fmt.Sprintf("%s at %s after %v", s.what, s.version, s.at.Round(time.Millisecond))
}

// around returns the steps of the watch from the last event before a version to the first after it.
func (w *watched) around(version int64) []moment {
	first, last := 0, len(w.trail)
	for i, s := range w.trail {
		at, err := strconv.ParseInt(s.version, 10, 64)
		switch {
		case err != nil || s.what == "begins" || s.what == "ends":
		case at < version:
			first = i
		default:
			return w.trail[first : i+1]
		}
	}
	return w.trail[first:last]
}

// note records a moment. The caller holds w.mu.
func (w *watched) note(what string) {
	w.trail = append(w.trail, moment{time.Since(w.begin), what, w.from})
}

func (w *watched) run(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		w.follow(ctx)
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// follow reads one watch to its end.
func (w *watched) follow(ctx context.Context) {
	client := w.server.Client.CoreV1().ConfigMaps(namespace)
	in, err := client.Watch(ctx, metav1.ListOptions{ResourceVersion: w.from, AllowWatchBookmarks: true})
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		w.relist(ctx, client)
		return
	}
	if err != nil {
		return // the server is down
	}
	defer in.Stop()
	w.mark("begins")
	defer w.mark("ends")
	for e := range in.ResultChan() {
		switch o := e.Object.(type) {
		case *corev1.ConfigMap:
			w.take(e.Type, o)
		case *metav1.Status:
			if o.Code == 410 {
				w.relist(ctx, client)
			}
			return
		}
	}
}

func (w *watched) mark(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note(what)
}

// relist goes on from what there is now, which it takes down: the last write may be part of it.
func (w *watched) relist(ctx context.Context, client typedcorev1.ConfigMapInterface) {
	list, err := client.List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gaps++
	w.from = list.ResourceVersion
	for _, o := range list.Items {
		w.seen[version(&o)] = change{o.Name, o.Data["value"]}
	}
}

func (w *watched) take(kind watch.EventType, o *corev1.ConfigMap) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.from = o.ResourceVersion
	w.note(string(kind))
	if kind == watch.Bookmark {
		return
	}
	at := version(o)
	if at <= w.last {
		w.broken = append(w.broken, fmt.Sprintf("%s %s at %d after %d", kind, o.Name, at, w.last))
	}
	c := change{o.Name, o.Data["value"]}
	if kind == watch.Deleted {
		c.value = ""
	}
	w.last, w.seen[at] = at, c
}

// check ends the clients and compares what each of them has received.
func (h *history) check(t *testing.T) {
	t.Helper()
	const end = "end"
	testbed.Until(t, "the last write", func() error {
		_, err := do(t.Context(), h.r.servers[0].Client.CoreV1().ConfigMaps(namespace), call{verb: create, key: end, value: end}, nil)
		if apierrors.IsAlreadyExists(err) {
			return nil // by a try whose answer was late
		}
		return err
	})
	for _, w := range h.watches {
		testbed.Until(t, "the whole history at "+w.server.host.Name(), func() error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if !slices.Contains(slices.Collect(maps.Values(w.seen)), change{end, end}) {
				return fmt.Errorf("at %d after %d gaps", w.last, w.gaps)
			}
			return nil
		})
	}
	h.stop()
	h.wg.Wait()
	linearizable(t, h.ops)
	all := map[int64]change{}
	gaps := 0
	for _, w := range h.watches {
		gaps += w.gaps
		for _, b := range w.broken {
			t.Errorf("the watch at %s: %s", w.server.host.Name(), b)
		}
		for at, c := range w.seen {
			if other, ok := all[at]; ok && other != c {
				t.Errorf("version %d is %v at %s and %v at another server", at, c, w.server.host.Name(), other)
			}
			all[at] = c
		}
	}
	for _, w := range h.watches {
		for at, c := range all {
			if _, ok := w.seen[at]; !ok && w.gaps == 0 {
				t.Errorf("the watch at %s lacks version %d, %v: %v", w.server.host.Name(), at, c, w.around(at))
			}
		}
	}
	for at, c := range h.written {
		if all[at] != c {
			t.Errorf("%v was written as version %d; watches have %v", c, at, all[at])
		}
	}
	unknowns := 0
	for _, op := range h.ops {
		if op.Output.(reply).result == unknown {
			unknowns++
		}
	}
	t.Logf("%d calls of the API, %d of an unknown result, %d writes in %d versions, %d lists by watches whose version was too old",
		len(h.ops), unknowns, len(h.written), len(all), gaps)
	if len(h.written) < 10*objectCount {
		t.Errorf("%d writes are too few to find anything", len(h.written))
	}
}
