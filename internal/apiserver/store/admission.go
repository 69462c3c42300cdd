package store

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/fairlead/fairlead/internal/apiserver/usage"
	"github.com/fairlead/fairlead/internal/registry/resourcequota"
	"github.com/fairlead/fairlead/internal/svc"
)

// spaceAdmission rejects what users write while the embedded store is full, so that
// the system can go on, and what any client writes while its disk is. Deletion is possible
// as long as etcd can go on.
type spaceAdmission struct {
	*admission.Handler
	space *Space
}

// shareAdmission keeps each namespace within its share of the store. It reserves what a write takes, so only quotas may reject a write
// after it: what they reject keeps its reservation for reservedFor.
type shareAdmission struct {
	*admission.Handler
	holdings *holdings
	exempt   func(namespace string) bool
}

var (
	_ admission.ValidationInterface = spaceAdmission{}
	_ admission.ValidationInterface = shareAdmission{}
)

// Admission returns the plugin that rejects writes while the store has no space. An external one rejects them itself.
func (e *Store) Admission() admission.Interface {
	return spaceAdmission{admission.NewHandler(admission.Create, admission.Update, admission.Delete), e.Space}
}

// Shares returns the plugin that rejects writes by which a namespace takes more than its share of the store. exempt reports whether a
// namespace may do so.
func (e *Store) Shares(exempt func(namespace string) bool) shareAdmission {
	return shareAdmission{admission.NewHandler(admission.Create, admission.Update), e.holdings, exempt}
}

// Validate accepts everything while there is room.
func (p spaceAdmission) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if p.space == nil || a.IsDryRun() || !isStored(a) {
		return nil
	}
	if why := p.space.disk.reject(a); why != "" {
		return insufficientStorage("DiskFull", why)
	}
	full := p.space.isFull()
	if !full && p.space.server().Backend().Size() <= p.space.quota || a.GetOperation() == admission.Delete || ofSystem(a.GetUserInfo()) {
		return nil
	}
	if old, ok := a.GetOldObject().(metav1.Object); ok && old.GetDeletionTimestamp() != nil {
		return nil // a finalizer must be able to go
	}
	if !full {
		return apierrors.NewTooManyRequests("the store is making room", 1)
	}
	return insufficientStorage("StoreFull", p.space.status().Message)
}

const (
	// eventBurst is how many times their share Events may take for a moment, until the oldest are removed.
	eventBurst = 2
	// eventParts is how many namespaces together may reserve all of that, and is part of what is fair: see reserveEvent.
	eventParts = 4
)

// Validate rejects what makes a namespace, or all Events, take more than their share of the store.
func (p shareAdmission) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	h, namespace := p.holdings, a.GetNamespace()
	w, counts := writeOf(a, h.prefix)
	if namespace == "" || !counts || a.IsDryRun() || !isStored(a) {
		return nil
	}
	if w.id.kind == corev1.Resource("events") {
		switch h.reserveEvent(w) {
		case noRoom:
			return apierrors.NewTooManyRequests("the Events take more than their share of the store; the oldest are being removed", 1)
		case perhapsRoom:
			return apierrors.NewTooManyRequests("other writes of Events may take what is left for the namespace "+namespace, 1)
		}
		return nil
	}
	made := a.GetSubresource() == "" && fromTemplate(a.GetResource().GroupResource())
	if ofSystem(a.GetUserInfo()) && !made || p.exempt(namespace) || w.more <= 0 {
		return nil
	}
	used, limit, r := h.reserve(w)
	switch r {
	case hasRoom:
		return nil
	case perhapsRoom:
		return apierrors.NewTooManyRequests("other writes in the namespace "+namespace+" may take the rest of its share of the store", 1)
	}
	const bytes = resourcequota.Bytes
	return admission.NewForbidden(a, fmt.Errorf("exceeded quota: the default of each namespace (1/%d of the store), requested: %s=%d, "+
		"used: %s=%d, limited: %s=%d; delete objects, or ask an administrator for a ResourceQuota with %s",
		namespaceShare, bytes, w.more, bytes, used, bytes, limit, bytes))
}

// writeOf returns what a stores below prefix, and whether that counts. The status of built-in kinds does not: only the system writes it.
// Labels and annotations of a Binding become the ones of its Pod, at pods/binding as at the older bindings.
func writeOf(a admission.Attributes, prefix string) (w write, counts bool) {
	gr, sub := a.GetResource().GroupResource(), a.GetSubresource()
	b, binds := a.GetObject().(*corev1.Binding)
	_, custom := a.GetObject().(*unstructured.Unstructured)
	switch {
	case binds:
		w.id = idOf(corev1.Resource("pods"), a.GetNamespace(), nameOf(a))
		if len(b.Labels)+len(b.Annotations) > 0 {
			w.more = usage.Size(&corev1.Binding{ObjectMeta: metav1.ObjectMeta{Labels: b.Labels, Annotations: b.Annotations}})
		}
		w.creates = anyUID
		return w, true
	case sub != "" && (sub != "status" || !custom):
		return w, false
	}
	w.id = idOf(gr, a.GetNamespace(), nameOf(a))
	w.size = usage.Size(a.GetObject()) + int64(len(w.id.key(prefix)))
	w.more = usage.Size(a.GetObject()) - usage.Size(a.GetOldObject())
	if old, err := meta.Accessor(a.GetOldObject()); err == nil {
		w.base, _ = strconv.ParseInt(old.GetResourceVersion(), 10, 64) // etcd's own
		return w, true
	}
	w.creates = anyUID
	if o, err := meta.Accessor(a.GetObject()); err == nil && o.GetUID() != "" {
		w.creates = o.GetUID()
	}
	return w, true
}

// Wrote takes in that o, of the kind gr, was stored: what is reserved for it can end when that is counted.
func (e *Store) Wrote(gr schema.GroupResource, o runtime.Object) {
	m, err := meta.Accessor(o)
	if err != nil || m.GetNamespace() == "" || e.holdings == nil {
		return
	}
	if revision, err := strconv.ParseInt(m.GetResourceVersion(), 10, 64); err == nil {
		e.holdings.wrote(idOf(gr, m.GetNamespace(), m.GetName()), m.GetUID(), revision)
	}
}

// nameOf returns the name of the object that is written. The server generates it before validation.
func nameOf(a admission.Attributes) string {
	if o, err := meta.Accessor(a.GetObject()); err == nil {
		return o.GetName()
	}
	return a.GetName()
}

// fromTemplate reports whether controllers make objects of the kind as large and as many as a user's object tells them.
func fromTemplate(gr schema.GroupResource) bool {
	switch gr {
	case corev1.Resource("pods"), schema.GroupResource{Group: appsv1.GroupName, Resource: "replicasets"},
		schema.GroupResource{Group: appsv1.GroupName, Resource: "controllerrevisions"}:
		return true
	}
	return false
}

// isStored reports whether a writes an object: reviews, tokens and evictions are only
// answered.
func isStored(a admission.Attributes) bool {
	group, sub := a.GetResource().Group, a.GetSubresource()
	return group != authenticationv1.GroupName && group != authorizationv1.GroupName && sub != "token" && sub != "eviction"
}

func insufficientStorage(reason metav1.StatusReason, message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInsufficientStorage, Reason: reason, Message: message,
	}}
}

// ofSystem reports whether u is a part of the system: a node, a controller or the
// server itself.
func ofSystem(u user.Info) bool {
	return slices.Contains(u.GetGroups(), user.NodesGroup) || u.GetName() == svc.ControllersUser || u.GetName() == user.APIServerUser
}
