// Package dialect parses annotations of Services, each in one file. It is pure.
// Errors contain the wrong value and the values allowed.
package dialect
