// Package scheme registers the Kubernetes API types that fairlead serves.
//
// Every v1 type is registered a second time as the hub ("__internal")
// version of its group, so that what is decoded, stored and handled is one Go
// type, and the only conversion is a copy. This package knows types only; defaults
// and field labels belong to the packages of the kinds, which add them to the
// complete scheme that package registry builds with New.
package scheme

import (
	"reflect"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

// Scheme holds only the types: strategies use it as their ObjectTyper and
// tests as a codec without defaults. It is complete when the package is loaded
// and never changed afterwards.
var Scheme = New()

// Codecs and ParameterCodec belong to Scheme and therefore set no defaults;
// the server uses the codecs of package registry.
var (
	Codecs         = serializer.NewCodecFactory(Scheme)
	ParameterCodec = runtime.NewParameterCodec(Scheme) //nolint:gochecknoglobals // constant in all but name, as Codecs
)

// New returns a scheme with all served types and their hub, without defaults.
func New() *runtime.Scheme {
	s := Versioned()
	for _, gv := range s.PrioritizedVersionsAllGroups() {
		addHub(s, gv)
	}
	utilruntime.Must(internalversion.AddToScheme(s))
	return s
}

// Versioned returns a scheme with all served types as clients know them,
// without the hub: what OpenAPI documents name.
func Versioned() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, g := range []struct {
		gv  schema.GroupVersion
		add func(*runtime.Scheme) error
	}{
		{corev1.SchemeGroupVersion, corev1.AddToScheme},
		{coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme},
		{discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme},
		{eventsv1.SchemeGroupVersion, eventsv1.AddToScheme},
		{networkingv1.SchemeGroupVersion, networkingv1.AddToScheme},
		{rbacv1.SchemeGroupVersion, rbacv1.AddToScheme},
		{authorizationv1.SchemeGroupVersion, authorizationv1.AddToScheme},
		{authenticationv1.SchemeGroupVersion, authenticationv1.AddToScheme},
		{certificatesv1.SchemeGroupVersion, certificatesv1.AddToScheme},
		{admissionv1.SchemeGroupVersion, admissionv1.AddToScheme},
		{appsv1.SchemeGroupVersion, appsv1.AddToScheme},
		{policyv1.SchemeGroupVersion, policyv1.AddToScheme},
		{autoscalingv1.SchemeGroupVersion, autoscalingv1.AddToScheme},   // only Scale is served
		{metricsv1beta1.SchemeGroupVersion, metricsv1beta1.AddToScheme}, // the last: "nodes" must mean the core group
	} {
		utilruntime.Must(g.add(s))
		utilruntime.Must(s.SetVersionPriority(g.gv))
	}
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	s.AddUnversionedTypes(schema.GroupVersion{Version: "v1"},
		&metav1.Status{}, &metav1.APIVersions{}, &metav1.APIGroupList{}, &metav1.APIGroup{}, &metav1.APIResourceList{})
	return s
}

// addHub registers the API types of gv, except the types of the meta group that
// every version carries, as the hub version too. The hub of events.k8s.io is
// core/v1 Event: both groups show the same stored objects.
func addHub(s *runtime.Scheme, gv schema.GroupVersion) {
	hub := schema.GroupVersion{Group: gv.Group, Version: runtime.APIVersionInternal}
	if gv.Group == eventsv1.GroupName {
		s.AddKnownTypeWithName(hub.WithKind("Event"), &corev1.Event{})
		s.AddKnownTypeWithName(hub.WithKind("EventList"), &corev1.EventList{})
		return
	}
	for kind, t := range s.KnownTypes(gv) {
		if !strings.HasPrefix(t.PkgPath(), "k8s.io/api/") && !strings.HasPrefix(t.PkgPath(), "k8s.io/metrics/") {
			continue
		}
		obj, err := s.New(gv.WithKind(kind))
		utilruntime.Must(err)
		s.AddKnownTypeWithName(hub.WithKind(kind), obj)
		utilruntime.Must(s.AddConversionFunc(obj, obj, copyInto))
	}
}

// copyInto is the conversion between a version and its hub, which plugins of admission
// ask for.
func copyInto(from, to any, _ conversion.Scope) error {
	reflect.ValueOf(to).Elem().Set(reflect.ValueOf(from.(runtime.Object).DeepCopyObject()).Elem())
	return nil
}
