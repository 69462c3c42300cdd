// Package static runs the Pods of files of the machine without the API server, and shows them in the API by mirrors.
package static

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/loop"
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

// Workers run the static Pods.
type Workers interface {
	// Static returns the UIDs of the static Pods that run, by NAMESPACE/NAME.
	Static() map[string]types.UID
	// UpdateStatic starts a Pod, or takes in a new version of it.
	UpdateStatic(*corev1.Pod)
	// Remove ends a Pod.
	Remove(uid types.UID, last *corev1.Pod)
	// Mirror has the status of a Pod written to its mirror.
	Mirror(uid types.UID, mirror *corev1.Pod)
}

// Options configure Pods from files.
type Options struct {
	NodeName string
	// Dir has the files, which must belong to root; "" for none.
	Dir     string
	Workers Workers
	// Client deletes mirrors, Mirrors creates them.
	Client, Mirrors kubernetes.Interface
	// NodeUID is the UID of this node's Node, "" before it is known. When it becomes known, Nudge is called.
	NodeUID func() types.UID
	// Complete sets the defaults of a Pod, and returns why the API server would reject it.
	Complete func(*corev1.Pod) field.ErrorList
	Events   *events.Recorder
	Log      *slog.Logger
}

// Pods runs the pods of the files in a directory of the machine, without the API
// server and whatever it has. Mirrors in the API show them.
type Pods struct {
	o    Options
	wake loop.Signal

	mu sync.Mutex
	// wanted are the pods of the files, by NAMESPACE/NAME.
	wanted  map[string]*corev1.Pod
	read    bool // the files have been read once
	mirrors mirrors

	// Of the goroutine of run.
	files    map[string]manifest
	problems map[string]string // the last one reported, by file
}

// New returns Pods that do nothing before Run.
func New(o Options) *Pods {
	return &Pods{
		o: o, wake: loop.NewSignal(), wanted: map[string]*corev1.Pod{},
		mirrors: mirrors{wake: loop.NewSignal(), objects: map[string]*corev1.Pod{}},
		files:   map[string]manifest{}, problems: map[string]string{},
	}
}

// Nudge has the Pods compared with their workers, and the mirrors with the Pods.
func (s *Pods) Nudge() {
	s.wake.Set()
	s.mirrors.wake.Set()
}

// Run follows the files until ctx ends. The Pods go on.
func (s *Pods) Run(ctx context.Context) {
	var mirroring sync.WaitGroup
	defer mirroring.Wait()
	mirroring.Go(func() { s.mirror(ctx) })
	s.run(ctx)
}

func (s *Pods) run(ctx context.Context) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		s.o.Log.Warn("cannot watch the directory of static pods; reading it periodically", "err", err, "period", staticRescan)
		s.follow(ctx, nil, nil, func() {})
		return
	}
	defer watcher.Close()
	s.follow(ctx, watcher.Events, watcher.Errors, func() {
		if s.o.Dir != "" {
			_ = watcher.Add(s.o.Dir) // it may appear later
		}
	})
}

// follow reads the directory at the start, after each event and error of its watcher, and
// periodically. watch is called before each reading: it may be another directory of that name.
func (s *Pods) follow(ctx context.Context, events <-chan fsnotify.Event, errs <-chan error, watch func()) {
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
			s.o.Log.Debug("cannot follow each change of the directory of static pods; reading it again", "err", err)
			settle()
			continue
		case <-s.wake:
		case <-timer.C:
			since = time.Time{}
			watch()
			s.scan()
			timer.Reset(staticRescan)
		}
		s.apply()
	}
}

// scan reads the files. One that cannot be used leaves its pod as it is.
func (s *Pods) scan() {
	names, err := manifestNames(s.o.Dir)
	s.report(s.o.Dir, err)
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
		f, err := s.files[name].read(s.o.Dir, name, s.parse)
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
	s.mirrors.wake.Set()
}

// report logs a problem of a file, with an Event, once. A nil error ends the problem.
func (s *Pods) report(name string, err error) {
	if err == nil {
		delete(s.problems, name)
		return
	}
	if s.problems[name] == err.Error() {
		return
	}
	s.problems[name] = err.Error()
	path := s.o.Dir
	if name != s.o.Dir {
		path += "/" + name
	}
	message := fmt.Sprintf("cannot use %s: %v", path, err)
	s.o.Log.Error("cannot use the file of a static pod; its running pod stays as it is", "path", path, "err", err)
	ref := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: s.o.NodeName, UID: types.UID(s.o.NodeName)}
	s.o.Events.Event(ref, corev1.EventTypeWarning, reasonStaticPod, message)
}

// apply starts the Pods that do not run and ends those without a file. One that has changed starts when the one before
// has ended.
func (s *Pods) apply() {
	s.mu.Lock()
	wanted, read := s.wanted, s.read
	s.mu.Unlock()
	if !read {
		return // the Pods of an earlier run go on
	}
	running := s.o.Workers.Static()
	for key, uid := range running {
		pod := wanted[key]
		if pod == nil || pod.UID != uid {
			s.o.Workers.Remove(uid, nil)
			continue
		}
		s.o.Workers.UpdateStatic(pod)
	}
	for key, pod := range wanted {
		if _, runs := running[key]; runs {
			continue // its end wakes s
		}
		s.o.Workers.UpdateStatic(pod)
		s.mirrors.mu.Lock()
		mirror := s.mirrors.objects[key]
		s.mirrors.mu.Unlock()
		if mirror != nil {
			s.o.Workers.Mirror(pod.UID, mirror)
		}
	}
}

// IsMirror reports whether a Pod of the API only shows one of a file.
func IsMirror(pod *corev1.Pod) bool {
	_, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return ok
}

func podKey(pod *corev1.Pod) string { return pod.Namespace + "/" + pod.Name }
