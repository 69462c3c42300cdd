package admit

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/warning"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/registry/annotation"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// classTimeout bounds the look at a GatewayClass, for which a write of a Gateway waits.
	classTimeout = 2 * time.Second
	// classGrace is how long a new GatewayClass may wait for its controller.
	classGrace = 10 * time.Second
	// maxInfrastructure bounds the warnings about annotations of a Gateway's infrastructure.
	maxInfrastructure = 5
)

// customWarnings warns about custom resources that fairlead reads: of annotations and labels without effect, and of a Gateway
// whose class no controller serves. Built-in kinds have their warnings from package registry.
type customWarnings struct {
	*admission.Handler
	class func(ctx context.Context, name string) (*gwv1.GatewayClass, error)
}

var _ admission.ValidationInterface = customWarnings{}

// NewCustomWarnings returns the plugin that warns about custom resources. It rejects nothing.
func NewCustomWarnings(config *rest.Config) (admission.ValidationInterface, error) {
	client, err := api.NewClient(config)
	if err != nil {
		return nil, err
	}
	classes := client.Classes()
	return customWarnings{
		admission.NewHandler(admission.Create, admission.Update),
		func(ctx context.Context, name string) (*gwv1.GatewayClass, error) {
			return classes.Get(ctx, name, metav1.GetOptions{})
		},
	}, nil
}

// Validate warns, and accepts every object.
func (c customWarnings) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	group := a.GetKind().Group
	now, ok := a.GetObject().(*unstructured.Unstructured)
	if group != svc.Domain && group != gwv1.GroupName || a.GetSubresource() != "" || !ok {
		return nil
	}
	before, _ := a.GetOldObject().(*unstructured.Unstructured)
	if before == nil {
		before = &unstructured.Unstructured{}
	}
	isGateway := group == gwv1.GroupName && a.GetKind().Kind == "Gateway"
	out := keyWarnings(a.GetKind().Kind, now, before)
	if isGateway {
		out = append(out, infrastructureWarnings(now, before)...)
		if w := c.unserved(ctx, className(now), className(before)); w != "" {
			out = append(out, w)
		}
	}
	for _, w := range out {
		warning.AddWarning(ctx, "", w)
	}
	return nil
}

// keyWarnings warns of the annotations and labels of an object.
func keyWarnings(kind string, now, before *unstructured.Unstructured) []string {
	at := field.NewPath("metadata")
	return slices.Concat(annotation.LabelWarnings(at.Child("labels"), now.GetLabels(), before.GetLabels()),
		annotation.Warnings(kind, at.Child("annotations"), now.GetAnnotations(), before.GetAnnotations()))
}

// infrastructureWarnings warns of the annotations that the Service of a Gateway gets.
func infrastructureWarnings(now, before *unstructured.Unstructured) []string {
	have, had := infrastructure(now), infrastructure(before)
	at := field.NewPath("spec", "infrastructure", "annotations")
	out := annotation.Warnings("Service", at, have, had)
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: have}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	for _, f := range claim.Read(s).Findings {
		old, was := had[f.Annotation]
		if f.State == dialect.Unknown && (!was || old != have[f.Annotation]) && len(out) < maxInfrastructure {
			out = append(out, at.String()+": "+f.Text)
		}
	}
	return out
}

func infrastructure(gateway *unstructured.Unstructured) map[string]string {
	out, _, err := unstructured.NestedStringMap(gateway.Object, "spec", "infrastructure", "annotations")
	if err != nil { // the schema refuses it
		return nil
	}
	return out
}

func className(gateway *unstructured.Unstructured) string {
	name, _, err := unstructured.NestedString(gateway.Object, "spec", "gatewayClassName")
	if err != nil { // the schema refuses it
		return ""
	}
	return name
}

// unserved returns why no controller serves a Gateway with a class that it had not before, "" if one does or that is not known.
func (c customWarnings) unserved(ctx context.Context, name, before string) string {
	if name == "" || name == before {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, classTimeout)
	defer cancel()
	class, err := c.class(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Sprintf("spec.gatewayClassName: there is no GatewayClass %q, and nothing serves the Gateway until there is one", name)
	case err != nil || apimeta.IsStatusConditionTrue(class.Status.Conditions, string(gwv1.GatewayClassConditionStatusAccepted)),
		time.Since(class.CreationTimestamp.Time) < classGrace:
		return ""
	}
	return fmt.Sprintf("spec.gatewayClassName: no controller has accepted the GatewayClass %q of controller %q, and nothing serves the "+
		"Gateway until one does", name, class.Spec.ControllerName)
}
