package runner

import (
	"context"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// adopt makes a worker for every pod of an earlier run and takes over the shims
// that still run. The objects of the pods come later.
func (r *Runner) adopt(ctx context.Context) error {
	dirs, err := podDirs(filepath.Join(r.o.StateDir, "pods"))
	if err != nil {
		return err
	}
	devices, err := link.Devices()
	if err != nil {
		return err
	}
	known := map[types.UID]bool{}
	for _, d := range dirs {
		rec, err := readPod(d)
		if err != nil || r.podDir(rec.UID) != d.dir {
			r.o.Log.Warn("cannot read the record of a pod; ending the pod", "dir", d.dir, "err", err)
			if err := endShim(ctx, d.dir); err != nil {
				r.o.Log.Error("cannot end the shim of a pod without a record", "dir", d.dir, "err", err)
				continue
			}
			if err := removePod(d); err != nil {
				r.o.Log.Error("cannot remove the state of a pod without a record", "dir", d.dir, "err", err)
			}
			continue // sweep removes its control group
		}
		known[rec.UID] = true
		w := newWorker(ctx, r, rec.UID, rec.Namespace, rec.Name)
		w.rec, w.static, w.pub.static = rec, rec.Static, rec.Static
		r.ipam.reserve(rec.IPs)
		shimCtx, cancel := context.WithTimeout(ctx, 5*time.Second)
		id, err := shim.Client{Dir: d.dir}.Process(shimCtx)
		cancel()
		switch {
		case err != nil:
			w.killRemains()
		case !netns.SameUser(id.Pid):
			// A namespace of 'fairlead up' that was killed: its network is gone,
			// and this process has no rights there to give the pod another one.
			w.log.Info("a pod of an earlier run is in another user namespace; starting it again", "shim", id.Pid)
			if err := endShim(ctx, d.dir); err != nil {
				w.log.Error("cannot end the pod of an earlier run", "err", err)
			}
			w.killRemains()
		default:
			w.adoptShim(id)
			w.relink = rec.Device != "" && !slices.Contains(devices, rec.Device)
			w.log.Info("adopted a running pod", "shim", id.Pid)
		}
		r.start(w)
	}
	if err := r.cgroups.sweep(ctx, func(uid types.UID) bool { return known[uid] }); err != nil {
		r.o.Log.Error("cannot remove control groups of earlier pods", "err", err)
	}
	return nil
}

func endShim(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	return shim.Client{Dir: dir}.Shutdown(ctx)
}
