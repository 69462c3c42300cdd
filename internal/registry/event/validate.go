package event

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/fairlead/fairlead/internal/registry/store"
)

func isEventsGroup(ctx context.Context) bool {
	info, ok := genericapirequest.RequestInfoFrom(ctx)
	return ok && info.APIGroup == eventsv1.GroupName
}

// validate is what both groups ask for. An Event that has eventTime was made by
// a new recorder, whichever group it came through, and is checked as one. The
// paths are the paths of core/v1 except reportingController, as Kubernetes has
// them.
func validate(e *corev1.Event, eventsGroup bool) field.ErrorList {
	var errs field.ErrorList
	involved := field.NewPath("involvedObject", "namespace")
	mismatch := func() {
		errs = append(errs, field.Invalid(involved, e.InvolvedObject.Namespace, "does not match event.namespace"))
	}
	about := e.InvolvedObject.Namespace
	if e.EventTime.IsZero() {
		// Events about objects outside namespaces lie in "default".
		if about != e.Namespace && (about != "" || e.Namespace != metav1.NamespaceDefault) {
			mismatch()
		}
	} else {
		if about == "" && e.Namespace != metav1.NamespaceDefault && e.Namespace != metav1.NamespaceSystem {
			mismatch()
		}
		errs = append(errs, validateRecorder(e, eventsGroup)...)
	}
	errs = append(errs, store.Invalids(field.NewPath("namespace"), e.Namespace, utilvalidation.IsDNS1123Subdomain(e.Namespace))...)
	return errs
}

// Limits of Kubernetes, in bytes.
const (
	maxAction, maxReason, maxNote, maxInstance = 128, 128, 1024, 128
)

// validateRecorder checks what new recorders say about themselves.
func validateRecorder(e *corev1.Event, eventsGroup bool) (errs field.ErrorList) {
	controller := field.NewPath("reportingComponent")
	if eventsGroup {
		controller = field.NewPath("reportingController")
	}
	if e.ReportingController == "" {
		errs = append(errs, field.Required(controller, ""))
	}
	errs = append(errs, store.Invalids(controller, e.ReportingController, utilvalidation.IsQualifiedName(e.ReportingController))...)
	for _, f := range []struct {
		name, value string
		required    bool
		limit       int
	}{
		{"reportingInstance", e.ReportingInstance, true, maxInstance}, {"action", e.Action, true, maxAction},
		{"reason", e.Reason, true, maxReason}, {"message", e.Message, false, maxNote},
	} {
		if f.required && f.value == "" {
			errs = append(errs, field.Required(field.NewPath(f.name), ""))
		}
		if len(f.value) > f.limit {
			errs = append(errs, field.Invalid(field.NewPath(f.name), "", fmt.Sprintf("can have at most %d characters", f.limit)))
		}
	}
	return errs
}

// validateNew is the stricter check of creation through events.k8s.io/v1.
func validateNew(e *corev1.Event) field.ErrorList {
	errs := store.ValidateMeta(&e.ObjectMeta, true, validation.NameIsDNSSubdomain)
	errs = append(errs, validateSeries(e)...)
	if e.EventTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("eventTime"), ""))
	}
	if e.Type != corev1.EventTypeNormal && e.Type != corev1.EventTypeWarning {
		errs = append(errs, field.Invalid(field.NewPath("type"), "", fmt.Sprintf("has invalid value: %v", e.Type)))
	}
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"firstTimestamp", !e.FirstTimestamp.IsZero()}, {"lastTimestamp", !e.LastTimestamp.IsZero()},
		{"count", e.Count != 0}, {"source", e.Source != corev1.EventSource{}},
	} {
		if f.set {
			errs = append(errs, field.Invalid(field.NewPath(f.name), "", "needs to be unset"))
		}
	}
	return errs
}

// validateNewUpdate: what an Event is about is written once, only its series
// goes on.
func validateNewUpdate(e, old *corev1.Event) field.ErrorList {
	errs := store.ValidateMetaUpdate(&e.ObjectMeta, &old.ObjectMeta)
	if !equality.Semantic.DeepEqual(e.Series, old.Series) {
		errs = append(errs, validateSeries(e)...)
	}
	for _, f := range []struct {
		name     string
		now, was any
	}{
		{"involvedObject", e.InvolvedObject, old.InvolvedObject}, {"reason", e.Reason, old.Reason},
		{"message", e.Message, old.Message}, {"source", e.Source, old.Source},
		{"firstTimestamp", e.FirstTimestamp, old.FirstTimestamp}, {"lastTimestamp", e.LastTimestamp, old.LastTimestamp},
		{"count", e.Count, old.Count}, {"type", e.Type, old.Type},
		// Clients differ in how they cut off below the microsecond
		// (kubernetes/kubernetes#111928).
		{"eventTime", micro(e.EventTime), micro(old.EventTime)},
		{"action", e.Action, old.Action}, {"related", e.Related, old.Related},
		{"reportingController", e.ReportingController, old.ReportingController},
		{"reportingInstance", e.ReportingInstance, old.ReportingInstance},
	} {
		errs = append(errs, validation.ValidateImmutableField(f.now, f.was, field.NewPath(f.name))...)
	}
	return errs
}

func micro(t metav1.MicroTime) metav1.MicroTime {
	return metav1.MicroTime{Time: t.Truncate(time.Microsecond)}
}

func validateSeries(e *corev1.Event) (errs field.ErrorList) {
	if e.Series == nil {
		return nil
	}
	if e.Series.Count < 2 {
		errs = append(errs, field.Invalid(field.NewPath("series.count"), "", "should be at least 2"))
	}
	if e.Series.LastObservedTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("series.lastObservedTime"), ""))
	}
	return errs
}
