// Package dialect reads annotations of Services: what they ask for becomes a
// neutral value, or an error that says what is wrong and what would be right. It
// is pure, and reads each annotation in one file.
package dialect
