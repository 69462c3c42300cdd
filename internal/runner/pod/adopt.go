package pod

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// adopt makes a worker for every pod of an earlier run and takes over the shims
// that still run. The objects of the pods come later.
func (p *Pods) adopt(ctx context.Context) error {
	dirs, err := Dirs(p.node.Dir)
	if err != nil {
		return err
	}
	devices, err := link.Devices()
	if err != nil {
		return err
	}
	p.reserve(dirs)
	known := map[types.UID]bool{}
	for _, d := range dirs {
		rec, err := readPod(d)
		if err != nil || p.node.podDir(rec.UID) != d.Dir {
			p.node.Log.Warn("cannot read the record of a pod; ending the pod", "dir", d.Dir, "err", err)
			if err := EndShim(ctx, d.Dir); err != nil {
				p.node.Log.Error("cannot end the shim of a pod without a record", "dir", d.Dir, "err", err)
				continue
			}
			if err := d.Remove(); err != nil {
				p.node.Log.Error("cannot remove the state of a pod without a record", "dir", d.Dir, "err", err)
			}
			continue // sweep removes its control group
		}
		known[rec.UID] = true
		w := newWorker(ctx, p.node, rec.UID, rec.Namespace, rec.Name)
		w.rec, w.static, w.pub.Static = rec, rec.Static, rec.Static
		shimCtx, cancel := context.WithTimeout(ctx, 5*time.Second)
		id, err := shim.Client{Dir: d.Dir}.Process(shimCtx)
		cancel()
		switch {
		case err != nil:
			w.sandbox.killRemains()
		case !netns.SameUser(id.Pid):
			// A namespace of 'fairlead up' that was killed: its network is gone,
			// and this process has no rights there to give the pod another one.
			w.log.Info("a pod of an earlier run is in another user namespace; starting it again", "shim", id.Pid)
			if err := EndShim(ctx, d.Dir); err != nil {
				w.log.Error("cannot end the pod of an earlier run", "err", err)
			}
			w.sandbox.killRemains()
		default:
			w.sandbox.adopt(id)
			if rec.Failure == nil {
				p.node.ports.adopt(rec)
			}
			w.sandbox.relink = rec.Device != "" && !slices.Contains(devices, rec.Device)
			w.log.Info("adopted a running pod", "shim", id.Pid)
		}
		p.mu.Lock()
		p.start(w)
		p.mu.Unlock()
	}
	if err := p.node.Groups.Sweep(ctx, func(uid types.UID) bool { return known[uid] }); err != nil {
		p.node.Log.Error("cannot remove control groups of earlier pods", "err", err)
	}
	return nil
}

// reserve has the node's network know all Pods of an earlier run before the first of them goes on.
func (p *Pods) reserve(dirs []Paths) {
	for _, d := range dirs {
		if rec, err := readPod(d); err == nil && p.node.podDir(rec.UID) == d.Dir {
			p.node.Network.Reserve(rec.Device, rec.Namespace+"/"+rec.Name, rec.IPs)
		}
	}
}

// EndShim ends the shim of the Pod in dir and its containers, within 15 s.
func EndShim(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	return shim.Client{Dir: dir}.Shutdown(ctx)
}
