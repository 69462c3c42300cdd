// The cloud providers whose annotations internal/dialect's tests compare with.
module github.com/fairlead/fairlead/test/clouds

go 1.26.0

require (
	go.universe.tf/metallb v0.16.2
	k8s.io/cloud-provider-aws v1.37.0
)
