package svc

import (
	"fmt"
	"strings"
)

// Name identifies a namespaced object. Its text form is "namespace/name".
type Name struct {
	Namespace, Name string
}

// NameOf returns the name of a Kubernetes object.
func NameOf(o interface {
	GetNamespace() string
	GetName() string
}) Name {
	return Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Compare orders names by namespace, then name.
func (n Name) Compare(o Name) int {
	if c := strings.Compare(n.Namespace, o.Namespace); c != 0 {
		return c
	}
	return strings.Compare(n.Name, o.Name)
}

// ParseName reads the text form "namespace/name".
func ParseName(s string) (Name, error) {
	ns, name, ok := strings.Cut(s, "/")
	if !ok || ns == "" || name == "" || strings.Contains(name, "/") {
		return Name{}, fmt.Errorf("%q is not of the form namespace/name", s)
	}
	return Name{Namespace: ns, Name: name}, nil
}

// PortName identifies one port of one Service. Port is empty for the only port
// of a single-port Service (behaviour 63). Its text form is "namespace/name" or
// "namespace/name:port".
type PortName struct {
	Name
	Port string
}

// String returns "namespace/name:port", without the colon when Port is empty.
func (p PortName) String() string {
	if p.Port == "" {
		return p.Name.String()
	}
	return p.Name.String() + ":" + p.Port
}

// ParsePortName reads the text form of a PortName.
func ParsePortName(s string) (PortName, error) {
	service, port, _ := strings.Cut(s, ":")
	name, err := ParseName(service)
	if err != nil {
		return PortName{}, err
	}
	return PortName{Name: name, Port: port}, nil
}

// Compare orders port names by Service, then port.
func (p PortName) Compare(o PortName) int {
	if c := p.Name.Compare(o.Name); c != 0 {
		return c
	}
	return strings.Compare(p.Port, o.Port)
}
