package runner

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Times of static pods.
const (
	// staticSettle is how long the directory must be at rest: editors and copies write in steps.
	staticSettle = 100 * time.Millisecond
	// staticSettleMax bounds that, for a directory that never rests.
	staticSettleMax = 2 * time.Second
	// staticRescan is that of kubelet (fileCheckFrequency): a directory that appears later
	// has no notifications.
	staticRescan = 20 * time.Second
)

// staticPods runs the pods of the files in a directory of the machine, without the API
// server and whatever it has. Mirrors in the API show them.
type staticPods struct {
	r    *Runner
	dir  string
	wake chan struct{}

	mu sync.Mutex
	// wanted are the pods of the files, by NAMESPACE/NAME.
	wanted  map[string]*corev1.Pod
	read    bool // the files have been read once
	mirrors mirrors

	// Of the goroutine of run.
	files    map[string]manifest
	problems map[string]string // the last one reported, by file
}

func newStaticPods(r *Runner, dir string) *staticPods {
	return &staticPods{
		r: r, dir: dir, wake: make(chan struct{}, 1), wanted: map[string]*corev1.Pod{},
		mirrors: mirrors{wake: make(chan struct{}, 1), objects: map[string]*corev1.Pod{}},
		files:   map[string]manifest{}, problems: map[string]string{},
	}
}

// nudge has the pods compared with their workers.
func (s *staticPods) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run follows the directory until ctx ends. Workers run with workCtx.
func (s *staticPods) run(ctx, workCtx context.Context) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		s.r.o.Log.Warn("cannot watch the directory of static pods; it is read periodically", "err", err, "period", staticRescan)
		s.follow(ctx, workCtx, nil, nil, func() {})
		return
	}
	defer watcher.Close()
	s.follow(ctx, workCtx, watcher.Events, watcher.Errors, func() {
		if s.dir != "" {
			_ = watcher.Add(s.dir) // it may appear later
		}
	})
}

// follow reads the directory at the start, after each event and error of its watcher, and
// periodically. watch is called before each reading: it may be another directory of that name.
func (s *staticPods) follow(ctx, workCtx context.Context, events <-chan fsnotify.Event, errs <-chan error, watch func()) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var since time.Time // the first event or error after the last reading
	settle := func() {
		if since.IsZero() {
			since = time.Now()
		}
		if time.Since(since) < staticSettleMax {
			timer.Reset(staticSettle)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			settle()
			continue
		case err := <-errs: // events are missing (fsnotify.ErrEventOverflow); unread, it would hold up the watcher
			s.r.o.Log.Debug("cannot follow each change of the directory of static pods; reading it again", "err", err)
			settle()
			continue
		case <-s.wake:
		case <-timer.C:
			since = time.Time{}
			watch()
			s.scan()
			timer.Reset(staticRescan)
		}
		s.apply(workCtx)
	}
}

// scan reads the files. One that cannot be used leaves its pod as it is.
func (s *staticPods) scan() {
	names, err := manifestNames(s.dir)
	s.report(s.dir, err)
	if err != nil {
		return
	}
	for name := range s.files {
		if !slices.Contains(names, name) {
			delete(s.files, name)
			delete(s.problems, name)
		}
	}
	wanted, from := map[string]*corev1.Pod{}, map[string]string{}
	for _, name := range names {
		f, err := s.files[name].read(s.dir, name, s.r.o.NodeName)
		s.files[name] = f
		if f.pod != nil {
			key := f.pod.Namespace + "/" + f.pod.Name
			if other := from[key]; other != "" && err == nil {
				err = fmt.Errorf("metadata.name: %s has a Pod of the same name", other)
			} else if other == "" {
				wanted[key], from[key] = f.pod, name
			}
		}
		s.report(name, err)
	}
	s.mu.Lock()
	s.wanted, s.read = wanted, true
	s.mu.Unlock()
	s.mirrors.nudge()
}

// report tells of what is wrong with a file, once.
func (s *staticPods) report(name string, err error) {
	if err == nil {
		delete(s.problems, name)
		return
	}
	if s.problems[name] == err.Error() {
		return
	}
	s.problems[name] = err.Error()
	path := s.dir
	if name != s.dir {
		path += "/" + name
	}
	message := fmt.Sprintf("cannot use %s: %v", path, err)
	s.r.o.Log.Error("cannot use a static pod; what runs of it stays", "path", path, "err", err)
	ref := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: s.r.o.NodeName, UID: types.UID(s.r.o.NodeName)}
	s.r.rec.Event(ref, corev1.EventTypeWarning, reasonStaticPod, message)
}

// apply starts the pods that do not run and ends those of which there is no file. One
// that has changed starts when the one before has ended.
func (s *staticPods) apply(ctx context.Context) {
	s.mu.Lock()
	wanted, read := s.wanted, s.read
	s.mu.Unlock()
	if !read {
		return // those of an earlier run go on
	}
	running := map[string]*worker{}
	s.r.each(func(w *worker) {
		if w.static {
			running[w.namespace+"/"+w.name] = w
		}
	})
	for key, w := range running {
		pod := wanted[key]
		switch {
		case pod == nil || pod.UID != w.uid:
			w.remove(nil)
		default:
			w.update(pod)
		}
	}
	for key, pod := range wanted {
		if running[key] != nil {
			continue // its end wakes s
		}
		w := newWorker(ctx, s.r, pod.UID, pod.Namespace, pod.Name)
		w.static, w.pub.static = true, true
		w.update(pod)
		s.r.start(w)
		s.mirrors.mu.Lock()
		mirror := s.mirrors.objects[key]
		s.mirrors.mu.Unlock()
		if mirror != nil {
			w.pub.mirror(mirror, w.uid)
		}
	}
}

// workerOf returns the worker of a static pod, nil if there is none.
func (s *staticPods) workerOf(key string) *worker {
	var found *worker
	s.r.each(func(w *worker) {
		if w.static && w.namespace+"/"+w.name == key {
			found = w
		}
	})
	return found
}

// isMirror reports whether a Pod of the API only shows one of a file.
func isMirror(pod *corev1.Pod) bool {
	_, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return ok
}

func podKey(pod *corev1.Pod) string { return pod.Namespace + "/" + pod.Name }
