def average(numbers):
    total = 0
    for number in numbers:
        total += number
    return total / len(numbers)  # of an empty list?
