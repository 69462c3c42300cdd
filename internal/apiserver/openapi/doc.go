// Package openapi holds the OpenAPI models of the served types, generated from
// the Go types of k8s.io/api and k8s.io/apimachinery.
package openapi

//go:generate go tool openapi-gen --go-header-file /dev/null --output-dir . --output-pkg github.com/fairlead/fairlead/internal/apiserver/openapi --output-file zz_generated.openapi.go --report-filename /dev/null k8s.io/api/core/v1 k8s.io/api/admissionregistration/v1 k8s.io/api/apps/v1 k8s.io/api/authentication/v1 k8s.io/api/authorization/v1 k8s.io/api/autoscaling/v1 k8s.io/api/certificates/v1 k8s.io/api/coordination/v1 k8s.io/api/discovery/v1 k8s.io/api/events/v1 k8s.io/api/networking/v1 k8s.io/api/policy/v1 k8s.io/api/rbac/v1 k8s.io/metrics/pkg/apis/metrics/v1beta1 k8s.io/apimachinery/pkg/apis/meta/v1 k8s.io/apimachinery/pkg/api/resource k8s.io/apimachinery/pkg/util/intstr k8s.io/apimachinery/pkg/runtime k8s.io/apimachinery/pkg/version
