package runner

import (
	"cmp"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// hostPorts are the host ports of the pods that have a network, for the proxy, which leads
// them there.
type hostPorts struct {
	changed func() // may be nil

	mu   sync.Mutex
	held map[types.UID]heldPorts
}

// heldPorts are those of one pod.
type heldPorts struct {
	svc.HostPorts
	started time.Time
}

// newHostPorts begins with those of the pods of an earlier run, so that the proxy of this
// one does not take them away before the pods are adopted.
func newHostPorts(stateDir string, changed func()) *hostPorts {
	h := &hostPorts{changed: changed, held: map[types.UID]heldPorts{}}
	dirs, err := podDirs(filepath.Join(stateDir, "pods"))
	if err != nil {
		return h // adopt reports it
	}
	for _, d := range dirs {
		if rec, err := readPod(d); err == nil && len(rec.HostPorts) > 0 && len(rec.IPs) > 0 &&
			filepath.Base(d.dir) == string(rec.UID) { // adopt ends the others
			h.held[rec.UID] = rec.hostPorts()
		}
	}
	return h
}

// set takes over what a pod has now, nothing if it has no ports or no addresses.
func (h *hostPorts) set(uid types.UID, now heldPorts) {
	h.mu.Lock()
	before, was := h.held[uid]
	is := len(now.Ports) > 0 && len(now.IPs) > 0
	if is {
		h.held[uid] = now
	} else {
		delete(h.held, uid)
	}
	h.mu.Unlock()
	if h.changed != nil && (was != is || is && !reflect.DeepEqual(before.HostPorts, now.HostPorts)) {
		h.changed()
	}
}

// HostPorts returns the host ports of this node's pods, in no order. It is safe for
// concurrent use.
func (r *Runner) HostPorts() []svc.HostPorts { return r.hostPorts.all() }

// all returns one entry for each name: that of the pod that started last, where one whose object
// was deleted by force still ends.
func (h *hostPorts) all() (out []svc.HostPorts) {
	h.mu.Lock()
	defer h.mu.Unlock()
	newest := map[svc.Name]heldPorts{}
	for _, p := range h.held {
		if o, ok := newest[p.Pod]; !ok || cmp.Or(p.started.Compare(o.started), strings.Compare(p.UID, o.UID)) > 0 {
			newest[p.Pod] = p
		}
	}
	for _, p := range newest {
		out = append(out, p.HostPorts)
	}
	return out
}

func (rec *podRecord) hostPorts() heldPorts {
	return heldPorts{svc.HostPorts{
		Pod: svc.Name{Namespace: rec.Namespace, Name: rec.Name}, UID: string(rec.UID), IPs: slices.Clone(rec.IPs), Ports: rec.HostPorts,
	}, rec.Started}
}

// publishHostPorts tells the proxy where the pod's host ports lead now: nowhere without a
// sandbox.
func (w *worker) publishHostPorts() {
	now := w.rec.hostPorts()
	if w.sandbox == nil {
		now = heldPorts{}
	}
	w.r.hostPorts.set(w.uid, now)
}

// hostPortsOf returns the host ports that lead to a pod: those of its containers and of init
// containers that go on running beside them; none in the machine's network, where its processes
// listen themselves.
func hostPortsOf(pod *corev1.Pod) (out []svc.HostPort) {
	if pod.Spec.HostNetwork {
		return nil
	}
	ended := func(c corev1.Container) bool { return !isSidecar(&c) }
	beside := slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), ended)
	for _, c := range slices.Concat(beside, pod.Spec.Containers) {
		for _, p := range c.Ports {
			proto, err := svc.ParseProtocol(string(p.Protocol))
			if err != nil || p.HostPort <= 0 || p.HostPort > 65535 || p.ContainerPort <= 0 || p.ContainerPort > 65535 {
				continue // the API has no such port
			}
			h := svc.HostPort{Protocol: proto, HostIP: p.HostIP, Port: uint16(p.HostPort), To: uint16(p.ContainerPort)}
			if !slices.Contains(out, h) {
				out = append(out, h)
			}
		}
	}
	return out
}
