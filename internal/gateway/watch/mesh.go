package watch

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// FollowMesh has the routes followed that name Services as their parents.
func (w *Watch) FollowMesh(ctx context.Context, running *sync.WaitGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.meshed = true
	w.followMore(ctx, running)
}

// setMeshed records whether a route names a Service as its parent. The caller holds mu.
func (w *Watch) setMeshed(n svc.Name, route kinds.Route, does bool) {
	w.dirtyMesh[n] = true
	routes := w.objects.Meshed[n]
	switch {
	case !does:
		if delete(routes, route); len(routes) == 0 {
			delete(w.objects.Meshed, n)
		}
	case routes == nil:
		w.objects.Meshed[n] = map[kinds.Route]bool{route: true}
	default:
		routes[route] = true
	}
}

// buildMeshes builds what has changed. The caller holds mu.
func (w *Watch) buildMeshes() {
	if w.dirtyMeshes {
		for n := range w.meshes {
			w.dirtyMesh[n] = true
		}
	}
	for n := range w.dirtyMesh {
		w.touch(slices.Collect(maps.Keys(w.objects.Meshed[n]))...)
		if w.copies.meshes = nil; len(w.objects.Meshed[n]) == 0 {
			delete(w.meshes, n)
			continue
		}
		w.meshes[n] = gateway.BuildMesh(&w.objects, n, w.meshes[n])
	}
	clear(w.dirtyMesh)
}
