package service

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// Options is what the storage of Services needs.
type Options struct {
	allocator.Options
	// StrictLoadBalancers rejects new load balancers of several protocols or
	// of SCTP.
	StrictLoadBalancers bool
	// Endpoints is the storage of Endpoints; a deleted Service takes the object
	// of its name along.
	Endpoints rest.GracefulDeleter
	// WriteTimeout is the longest that a write of a Service may take; 0 means
	// DefaultWriteTimeout. ClaimGrace is three times as long if it is 0.
	WriteTimeout time.Duration
}

// Storage serves Services. Run must run while it is in use.
type Storage struct {
	*allocator.Allocator
	Service *REST
	Status  *store.SubREST
}

// REST is the storage of Services.
type REST struct {
	*store.REST
	families  families
	allocator *allocator.Allocator
	endpoints rest.GracefulDeleter
	// writeTimeout is the longest that a write may take.
	writeTimeout time.Duration
	log          *slog.Logger
}

// NewStorage builds the storage. It reads and writes nothing before Run.
func NewStorage(o Options) (Storage, error) {
	fams, err := familiesOf(o.ServiceCIDRs)
	if err != nil {
		return Storage{}, err
	}
	services := rules(o.StrictLoadBalancers)
	s, err := store.New(store.Kind{
		Resource: schema.GroupResource{Resource: "services"}, Singular: "service",
		ShortNames: []string{"svc"}, Categories: []string{"all"},
		New:      store.Empty[corev1.Service],
		NewList:  store.Empty[corev1.ServiceList],
		Strategy: services.Strategy(),
		Attrs:    attrs,
		Table:    newTable(),
	}, o.RESTOptions)
	if err != nil {
		return Storage{}, err
	}
	o.WriteTimeout = cmp.Or(o.WriteTimeout, DefaultWriteTimeout)
	o.ClaimGrace = cmp.Or(o.ClaimGrace, 3*o.WriteTimeout)
	al, err := allocator.New(o.Options, s)
	if err != nil {
		return Storage{}, err
	}
	r := &REST{REST: s, families: fams, allocator: al, endpoints: o.Endpoints, writeTimeout: o.WriteTimeout, log: o.Log}
	s.Store.ReturnDeletedObject = true
	s.Store.Decorator = r.decorate
	s.Store.AfterDelete = r.afterDelete
	// The status may remove the last finalizer, so it releases too; but it
	// never allocates.
	status := store.NewSub(s, statusRules(services).Strategy())
	s.Store.BeginCreate = r.beginCreate
	s.Store.BeginUpdate = r.beginUpdate
	return Storage{Allocator: al, Service: r, Status: status}, nil
}

// decorate completes a Service that is read, as an object or in a list.
func (r *REST) decorate(obj runtime.Object) {
	switch o := obj.(type) {
	case *corev1.Service:
		r.families.defaultOnRead(o)
	case *corev1.ServiceList:
		for i := range o.Items {
			r.families.defaultOnRead(&o.Items[i])
		}
	}
}

// afterDelete releases what the deleted Service had.
func (r *REST) afterDelete(obj runtime.Object, options *metav1.DeleteOptions) {
	if dryrun.IsDryRun(options.DryRun) {
		return
	}
	s := obj.(*corev1.Service)
	r.families.defaultOnRead(s)
	ctx := genericrequest.WithNamespace(context.Background(), s.Namespace)
	if r.endpoints != nil {
		ctx, cancel := context.WithTimeout(ctx, endpointsTimeout)
		_, _, err := r.endpoints.Delete(ctx, s.Name, rest.ValidateAllObjectFunc, &metav1.DeleteOptions{})
		cancel()
		if err != nil && !apierrors.IsNotFound(err) {
			r.log.Warn("cannot delete the Endpoints of a deleted Service", "service", s.Namespace+"/"+s.Name, "err", err)
		}
	}
	r.allocator.Release(ctx, s)
}

// endpointsTimeout bounds the deletion of the Endpoints of a deleted Service.
const endpointsTimeout = 10 * time.Second

// Create stores a new Service with what is allocated for it.
func (r *REST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	options *metav1.CreateOptions) (runtime.Object, error) {
	ctx, w, cancel := withWrite(ctx, r.writeTimeout)
	defer cancel()
	out, err := r.REST.Create(ctx, obj, func(ctx context.Context, obj runtime.Object) error {
		if validate != nil {
			if err := validate(ctx, obj); err != nil {
				return err
			}
		}
		w.reached = true
		return nil
	}, options)
	w.settle(ctx, err)
	return out, err
}

// Update stores a changed Service, or a new one, with what is allocated for it.
func (r *REST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, forceCreate bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	ctx, w, cancel := withWrite(ctx, r.writeTimeout)
	defer cancel()
	out, created, err := r.REST.Update(ctx, name, info, create, update, forceCreate, options)
	w.settle(ctx, err)
	return out, created, err
}

func (r *REST) beginCreate(ctx context.Context, obj runtime.Object, options *metav1.CreateOptions) (genericregistry.FinishFunc, error) {
	s := obj.(*corev1.Service)
	if s.Name == "" { // nothing can be claimed for it
		return nil, invalidService(s, field.ErrorList{field.Required(field.NewPath("metadata", "name"), "name or generateName is required")})
	}
	linkClusterIPs(s, nil)
	if err := r.families.initFamilies(s, nil); err != nil {
		return nil, err
	}
	// The name becomes part of the claims. A wrong one fails the validation that
	// follows, so nothing needs to be claimed.
	wrong := len(validation.NameIsDNSLabel(s.Name, false)) > 0
	return r.begin(ctx, s, allocator.PlanCreate(s), wrong || dryrun.IsDryRun(options.DryRun))
}

func (r *REST) beginUpdate(ctx context.Context, obj, old runtime.Object, options *metav1.UpdateOptions) (genericregistry.FinishFunc,
	error) {
	cur, prev := obj.(*corev1.Service), old.(*corev1.Service)
	r.families.defaultOnRead(prev)
	keepAllocated(cur, prev)
	linkClusterIPs(cur, prev)
	if err := r.families.initFamilies(cur, prev); err != nil {
		return nil, err
	}
	return r.begin(ctx, cur, allocator.PlanUpdate(cur, prev), dryrun.IsDryRun(options.DryRun))
}

// begin claims what p requests and hands the transaction to the write that ctx
// belongs to.
func (r *REST) begin(ctx context.Context, s *corev1.Service, p allocator.Plan, dryRun bool) (genericregistry.FinishFunc, error) {
	w := writeOf(ctx)
	w.restart(ctx)
	t, err := r.allocator.Begin(ctx, s, p, dryRun)
	if err != nil {
		return nil, err
	}
	w.last = t
	return w.finish, nil
}
