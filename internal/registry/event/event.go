// Package event stores Events for one hour and shows them in two groups:
// core/v1, and events.k8s.io/v1, which newer recorders write.
package event

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// Life is how long an Event is kept after its last change.
const Life = time.Hour

// NewStorage returns the storage of Events for core/v1 and, of the same
// objects, for events.k8s.io/v1.
func NewStorage(opts generic.RESTOptionsGetter) (core, events rest.Storage, err error) {
	// Recorders update an Event that may have expired.
	rules := store.Rules[*corev1.Event]{
		CreateOnUpdate: true, Validate: validateWrite,
		Create: func(_ context.Context, e *corev1.Event) { cutMessage(e) },
		Update: func(e, _ *corev1.Event) { cutMessage(e) },
	}
	r, err := store.New(store.Kind{
		Resource:   corev1.Resource("events"),
		Singular:   "event",
		ShortNames: []string{"ev"},
		New:        store.Empty[corev1.Event],
		NewList:    store.Empty[corev1.EventList],
		Strategy:   rules.Strategy(),
		Attrs:      attrs,
		Table:      table(),
	}, opts)
	if err != nil {
		return nil, nil, err
	}
	r.Decorator = clearListTypes
	r.TTLFunc = func(runtime.Object, uint64, bool) (uint64, error) { return uint64(Life / time.Second), nil }
	return r, r, nil
}

// cutMessage cuts the message of an older recorder, which knows no limit, to the limit of a note. Newer recorders get an
// error. A message of any length could fill the store.
func cutMessage(e *corev1.Event) {
	if e.EventTime.IsZero() && len(e.Message) > maxNote {
		e.Message = strings.ToValidUTF8(e.Message[:maxNote-len(cutMark)], "") + cutMark
	}
}

// cutMark ends a message that was cut.
const cutMark = "..."

// clearListTypes takes the type off the items of a list, which has it. Events are
// not read through the watch cache, which does that for other kinds.
func clearListTypes(obj runtime.Object) {
	if list, ok := obj.(*corev1.EventList); ok {
		for i := range list.Items {
			list.Items[i].TypeMeta = metav1.TypeMeta{}
		}
	}
}

// AddToScheme adds what the kind needs beyond its types.
func AddToScheme(s *runtime.Scheme) error {
	if err := addConversions(s); err != nil {
		return err
	}
	involved := []string{"kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath"}
	core, regarding := []string{"reason", "reportingComponent", "source", "type"}, []string{"reason", "reportingController", "type"}
	for _, f := range involved {
		core = append(core, "involvedObject."+f)
		regarding = append(regarding, "regarding."+f)
	}
	if err := store.AddFieldLabels(s, corev1.SchemeGroupVersion.WithKind("Event"), core...); err != nil {
		return err
	}
	return store.AddFieldLabels(s, eventsv1.SchemeGroupVersion.WithKind("Event"), regarding...)
}

// attrs supplies the fields under the names of both groups.
func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	e := obj.(*corev1.Event)
	source := e.Source.Component
	if source == "" {
		source = e.ReportingController
	}
	set := fields.Set{
		"metadata.name": e.Name, "metadata.namespace": e.Namespace,
		"reason": e.Reason, "type": e.Type, "source": source,
		"reportingComponent": e.ReportingController, "reportingController": e.ReportingController,
	}
	o := e.InvolvedObject
	for _, p := range []string{"involvedObject.", "regarding."} {
		set[p+"kind"], set[p+"namespace"], set[p+"name"], set[p+"uid"] = o.Kind, o.Namespace, o.Name, string(o.UID)
		set[p+"apiVersion"], set[p+"resourceVersion"], set[p+"fieldPath"] = o.APIVersion, o.ResourceVersion, o.FieldPath
	}
	return e.Labels, set, nil
}

func table() rest.TableConvertor {
	doc := corev1.Event{}.SwaggerDoc()
	return store.NewNamelessTable([]store.Column{
		{Name: "Last Seen", Description: doc["lastTimestamp"]},
		{Name: "Type", Description: doc["type"]},
		{Name: "Reason", Description: doc["reason"]},
		{Name: "Object", Description: doc["involvedObject"]},
		{Name: "Subobject", Wide: true, Description: corev1.ObjectReference{}.SwaggerDoc()["fieldPath"]},
		{Name: "Source", Wide: true, Description: doc["source"]},
		{Name: "Message", Description: doc["message"]},
		{Name: "First Seen", Wide: true, Description: doc["firstTimestamp"]},
		{Name: "Count", Wide: true, Description: doc["count"]},
		{Name: "Name", Wide: true, IsName: true, Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]},
	}, func(e *corev1.Event) []any {
		first, last, count := times(e)
		return []any{
			store.Age(last), e.Type, e.Reason, object(e), e.InvolvedObject.FieldPath,
			source(e), e.Message, store.Age(first), count, e.Name,
		}
	})
}

// times gives when e was first and last seen and how often, from whichever of
// the old and new fields are set.
func times(e *corev1.Event) (first, last metav1.Time, count int64) {
	first, last = e.FirstTimestamp, e.LastTimestamp
	if first.IsZero() {
		first = metav1.Time(e.EventTime)
	}
	n := e.Count
	if e.Series != nil {
		last, n = metav1.Time(e.Series.LastObservedTime), e.Series.Count
	}
	if last.IsZero() {
		last = first
	}
	if n == 0 {
		n = 1
	}
	return first, last, int64(n)
}

func object(e *corev1.Event) string {
	if e.InvolvedObject.Name == "" {
		return lower(e.InvolvedObject.Kind)
	}
	return lower(e.InvolvedObject.Kind) + "/" + e.InvolvedObject.Name
}

func source(e *corev1.Event) string {
	component, host := e.Source.Component, e.Source.Host
	if component == "" {
		component, host = e.ReportingController, e.ReportingInstance
	}
	if host == "" {
		return component
	}
	return component + ", " + host
}

// validateWrite checks e as a replacement of before, nil on create, by the rules
// of the group that the request names.
func validateWrite(ctx context.Context, e, before *corev1.Event) field.ErrorList {
	newGroup := isEventsGroup(ctx)
	errs := validate(e, newGroup)
	switch {
	case !newGroup:
		return errs
	case before == nil:
		return append(errs, validateNew(e)...)
	}
	return append(errs, validateNewUpdate(e, before)...)
}
