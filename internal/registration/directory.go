package registration

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// scanPeriod is how often the files are looked at. A file counts when it has not
	// changed for as long: it may still be being written.
	scanPeriod = 250 * time.Millisecond
	// comparePeriod is how often the API is compared with the files though none has
	// changed, and retryPeriod how soon after a failure.
	comparePeriod  = 10 * time.Second
	retryPeriod    = 2 * time.Second
	requestTimeout = 10 * time.Second
	maxFile        = 1 << 20
)

// Directory keeps the programs registered that the files *.yaml of a directory describe.
type Directory struct {
	// Path is that of the directory. There need not be one.
	Path string
	// Node is this one's name.
	Node string
	// Client may create and delete registrations on Node.
	Client kubernetes.Interface
	Log    *slog.Logger

	// files are those seen last, by their path.
	files map[string]*file
	// problems are the logged problems, by subject.
	problems map[string]string
	// idle reports that there are neither files nor registrations of any, so that only a
	// file can change that: most nodes have none, and need not ask the API.
	idle bool
}

// file is the last known state of a file.
type file struct {
	info  os.FileInfo
	specs []Spec
	// read is set if specs were read from the file that info describes. valid is set if it ever
	// had some: registrations of a file that was never valid are not removed.
	read, valid bool
}

// Run follows the directory until ctx ends. Registrations stay then.
func (d *Directory) Run(ctx context.Context) error {
	d.files, d.problems = map[string]*file{}, map[string]string{}
	tick := time.NewTicker(scanPeriod)
	defer tick.Stop()
	var next time.Time
	for {
		if changed := d.scan(); changed || !d.idle && !time.Now().Before(next) {
			err := d.compare(ctx)
			d.report("the API", err)
			next = time.Now().Add(comparePeriod)
			if err != nil {
				next = time.Now().Add(retryPeriod)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// report logs a problem once, and its end.
func (d *Directory) report(about string, err error) {
	switch {
	case err == nil && d.problems[about] != "":
		d.Log.Info("the directory of services is valid again", "about", about)
		delete(d.problems, about)
	case err != nil && d.problems[about] != err.Error():
		d.Log.Error("cannot register programs of the directory of services; retrying", "err", err)
		d.problems[about] = err.Error()
	}
}

// scan reads the files that have changed and reports whether any has.
func (d *Directory) scan() (changed bool) {
	names, err := fileio.TrustedFiles(d.Path, ".yaml")
	if err != nil {
		err = fmt.Errorf("%s: %w", d.Path, err)
	}
	d.report(d.Path, err)
	if err != nil {
		return false // what is registered stays
	}
	there := map[string]bool{}
	for _, name := range names {
		path := filepath.Join(d.Path, name)
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		there[path] = true
		if err != nil {
			d.report(path, err)
			continue
		}
		f := d.files[path]
		if f == nil {
			f = &file{}
			d.files[path] = f
		}
		same := f.info != nil && os.SameFile(f.info, info) && f.info.ModTime().Equal(info.ModTime()) && f.info.Size() == info.Size() &&
			f.info.Mode() == info.Mode()
		f.info = info
		if same && f.read || !same && time.Since(info.ModTime()) < scanPeriod {
			f.read = f.read && same
			continue
		}
		data, err := fileio.ReadTrusted(path, maxFile)
		f.read = err == nil // otherwise read it again: a new owner does not change the file
		var specs []Spec
		if err == nil {
			specs, err = Parse(path, d.Node, data)
		} else {
			err = fmt.Errorf("%s: %w", path, err)
		}
		d.report(path, err)
		if err == nil {
			f.specs, f.valid, changed = specs, true, true
		}
	}
	for path := range d.files {
		if !there[path] {
			delete(d.files, path)
			delete(d.problems, path)
			changed = true
		}
	}
	return changed
}

// wanted returns the Pods of all files, by namespace and name.
func (d *Directory) wanted() (map[string]*corev1.Pod, error) {
	out := map[string]*corev1.Pod{}
	var errs []error
	for _, path := range slices.Sorted(maps.Keys(d.files)) {
		for _, s := range d.files[path].specs {
			s.File = path
			if s.Namespace == "" {
				s.Namespace = metav1.NamespaceDefault
			}
			p, err := s.Pod()
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", path, err))
				continue
			}
			key := p.Namespace + "/" + p.Name
			if first := out[key]; first != nil {
				errs = append(errs, fmt.Errorf("%s: name: %s is in %s as well, which counts", path, s.Name,
					first.Annotations[svc.ServicesFileAnnotation]))
				continue
			}
			out[key] = p
		}
	}
	return out, errors.Join(errs...)
}

// compare brings the API in line with the files.
func (d *Directory) compare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	d.idle = false
	list, err := d.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", d.Node).String(),
	})
	if err != nil {
		return err
	}
	want, err := d.wanted()
	errs := []error{err}
	d.idle = len(d.files) == 0
	replaced := map[string]bool{}
	for i := range list.Items {
		have := &list.Items[i]
		path := have.Annotations[svc.ServicesFileAnnotation]
		if !Is(have) || path == "" || have.DeletionTimestamp != nil {
			continue
		}
		d.idle = false
		key := have.Namespace + "/" + have.Name
		if p := want[key]; p != nil && Same(have, p) {
			delete(want, key)
			continue
		} else if p == nil && d.keeps(path) {
			continue
		}
		now := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &have.UID}}
		err := d.Client.CoreV1().Pods(have.Namespace).Delete(ctx, have.Name, now)
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, err)
			continue
		}
		replaced[key] = true
		d.Log.Info("a program is no longer registered", "namespace", have.Namespace, "pod", have.Name, "file", path)
	}
	cordoned := len(want) > 0 && d.cordoned(ctx)
	for _, key := range slices.Sorted(maps.Keys(want)) {
		p := want[key]
		if cordoned && !replaced[key] {
			errs = append(errs, fmt.Errorf("%s: %s: node %s is cordoned: it is registered after 'kubectl uncordon %s'",
				p.Annotations[svc.ServicesFileAnnotation], p.Name, d.Node, d.Node))
			continue
		}
		switch _, err := Write(ctx, d.Client, p); {
		case apierrors.IsForbidden(err):
			errs = append(errs, fmt.Errorf("%s: %w: let nodes register programs there by 'kubectl create rolebinding nodes-register "+
				"--namespace %s --clusterrole system:node-registrar --group system:nodes'",
				p.Annotations[svc.ServicesFileAnnotation], err, p.Namespace))
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %s: %w", p.Annotations[svc.ServicesFileAnnotation], p.Name, err))
		default:
			d.Log.Info("registered a program", "namespace", p.Namespace, "pod", p.Name, "file", p.Annotations[svc.ServicesFileAnnotation])
		}
	}
	return errors.Join(errs...)
}

// cordoned reports whether the node takes no new Pods: a drain that deletes registrations would
// otherwise find them again at once.
func (d *Directory) cordoned(ctx context.Context) bool {
	n, err := d.Client.CoreV1().Nodes().Get(ctx, d.Node, metav1.GetOptions{})
	return err == nil && n.Spec.Unschedulable
}

// keeps reports whether the registrations of a file stay although it does not name them: it
// is there, and has not been valid since this agent's start.
func (d *Directory) keeps(path string) bool {
	if filepath.Dir(path) == filepath.Clean(d.Path) && d.problems[d.Path] != "" {
		return true
	}
	f := d.files[path]
	return f != nil && !f.valid
}
