// The definitions of other projects, which the API server's tests install.
module github.com/fairlead/fairlead/test/crds

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.19.0
	sigs.k8s.io/gateway-api v1.4.0
)
